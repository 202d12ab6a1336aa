"""Prompts: the context alone first, then the question and what leads to the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsearch.errors import IncompatibleError
from kvsearch.models.bundled import tokenizer
from kvsearch.tasks.prompts import PLAIN_PROMPT, PromptFormat
from kvsearch.tasks.synthetic.vocabulary import BOS, TOKEN_ID

from ..tiny import chat_tokenizer

BOS_ID = TOKEN_ID[BOS]


def plain(prompt: str = " {question}") -> PromptFormat:
    return PromptFormat(tokenizer(), prompt)


def words(ids: torch.Tensor) -> str:
    assert ids.dtype == torch.int64
    assert ids.shape[0] == 1
    return str(tokenizer().decode(ids[0].tolist()))


def test_without_a_chat_template() -> None:
    prompt = plain("mark {question} =")
    assert not prompt.chat
    assert words(prompt.context("the calm fox .")) == "<bos> the calm fox ."
    assert words(prompt.question("? vote")) == "mark ? vote ="
    assert words(prompt.answer("anchor .")) == "anchor ."


def test_the_standard_prompt() -> None:
    seen: list[tuple[str, bool]] = []

    class Spy:
        chat_template = None

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            seen.append((text, add_special_tokens))
            return {"input_ids": [7]}

    prompt = PromptFormat(Spy())
    prompt.context("C")
    prompt.question("Q?")
    prompt.answer("A")
    assert PLAIN_PROMPT == "\n\nQuestion: {question}\nAnswer:"
    assert seen == [("C", True), ("\n\nQuestion: Q?\nAnswer:", False), (" A", False)]


@pytest.mark.parametrize("text", ["{", "}", "{}", "{0}", "{question}", "{answer}"])
def test_braces_are_letters_like_others(text: str) -> None:
    """Questions and prompts may hold code; only {question} in the prompt is a place."""
    expected = f"{text} {{x}} = ".split()
    prompt = PromptFormat(tokenizer(), "{question} {x} =")
    # unknown words, one token each
    assert prompt.question(text).shape[1] == len(expected)


def test_with_a_chat_template_context_question_and_answer_make_one_conversation() -> None:
    prompt = PromptFormat(chat_tokenizer())
    assert prompt.chat
    context, question = prompt.context("the calm fox ."), prompt.question("? vote")
    assert words(context) == "<bos> recall the calm fox ."
    assert words(question) == "? vote . mark ="
    assert words(prompt.answer("anchor .")) == "anchor ."
    rendered = chat_tokenizer().apply_chat_template(
        [{"role": "user", "content": "the calm fox .\n\n? vote"}], add_generation_prompt=True, tokenize=False
    )
    whole = chat_tokenizer()(rendered, add_special_tokens=False)["input_ids"]
    assert torch.cat([context, question], 1)[0].tolist() == whole
    assert whole.count(BOS_ID) == 1  # the template writes it, the tokenizer must not


def test_a_template_that_drops_the_message() -> None:
    prompt = PromptFormat(chat_tokenizer("{{ bos_token }} mark ="))
    for ask in (prompt.context, prompt.question):
        with pytest.raises(IncompatibleError, match="drops the user's message"):
            ask("x")


def test_an_empty_context() -> None:
    silent = tokenizer()
    silent.backend_tokenizer.post_processor = None  # no <bos>
    with pytest.raises(IncompatibleError, match="context is empty"):
        PromptFormat(silent).context("  ")
    assert words(plain().context("")) == "<bos>"


def test_an_empty_question_and_answer() -> None:
    assert plain().question("").shape == (1, 0)
    assert plain().question("").dtype == torch.int64
    with pytest.raises(IncompatibleError, match="the answer '  ' is empty"):
        plain().answer("  ")


@pytest.mark.parametrize("made", [tokenizer, chat_tokenizer])
def test_decode(made: Any) -> None:
    assert PromptFormat(made()).decode([TOKEN_ID["anchor"], TOKEN_ID["."], BOS_ID]) == "anchor ."
