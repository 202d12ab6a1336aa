"""Prompts: the context alone first, then the question and what leads to the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.prompts import PLAIN_PROMPT, EmptyTextError, PromptFormat, QuestionText, cut_at_stop, find_stop
from scripts.train_bundled import tokenizer
from tests.tiny import CHAT_TEMPLATE, Listed, chat_tokenizer


def plain(prompt: str = " {question}") -> PromptFormat:
    return PromptFormat(tokenizer(), prompt)


def words(ids: torch.Tensor) -> str:
    assert ids.dtype == torch.int64
    assert ids.shape[0] == 1
    return str(tokenizer().decode(ids[0].tolist()))


class Letters:
    """A tokenizer whose tokens are characters, which it notes are asked for; `chat_template` may be any."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + list(map(ord, text))}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['content']}>" for message in messages)


def text_of(ids: torch.Tensor) -> str:
    return "".join(map(chr, ids[0].tolist()))


def test_the_standard_prompt() -> None:
    prompt = PromptFormat(Letters())
    assert PLAIN_PROMPT == "\n\nQuestion: {question}\nAnswer:"
    context, [(question, answer)] = prompt.encode("C", [QuestionText("Q?", answer="A")])
    parts = ["\x01C", "\n\nQuestion: Q?\nAnswer:", " A"]
    assert list(map(text_of, (context, question, answer))) == parts
    assert list(map(text_of, (prompt.context("C"), prompt.question("Q?"), prompt.answer("A")))) == parts


def test_a_template_can_be_left_out() -> None:
    prompt = PromptFormat(chat_tokenizer(), " {question}", template=False)
    assert not prompt.chat
    assert words(prompt.context("the calm fox .")) == "<bos> the calm fox ."
    assert words(prompt.question("? vote", " recall")) == "? vote recall"
    wanted = PromptFormat.of(chat_tokenizer(), Listed("t", (), "= {question}", chat=True))
    unwanted = PromptFormat.of(chat_tokenizer(), Listed("t", (), "= {question}", chat=False))
    assert [words(made.question("? vote")) for made in (wanted, unwanted)] == ["? vote . mark =", "= ? vote"]
    assert not PromptFormat.of(tokenizer(), Listed("t", (), chat=True)).chat  # there is none


def test_a_template_s_date_does_not_move() -> None:
    """As Llama 3.2's, which would ask the clock."""
    dated = "{% if date_string is not defined %}{% set date_string = strftime_now('%d') %}{% endif %}{{ date_string }} "
    prompt = PromptFormat(chat_tokenizer(dated + CHAT_TEMPLATE))
    assert prompt.context("the")[0].tolist() == tokenizer()(
        "26 Jul 2024 <bos> recall the", add_special_tokens=False
    )["input_ids"]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "form", "prefix", "question", "answer", "expected"),
    [
        (None, "{question}\nAnswer:", "", "", "A", " A"),
        (None, "{question}\nAnswer:", " It is\n", "", "A", "A"),
        (None, "{question}\nAnswer:", "", "", " A", " A"),  # it brings its blank along
        (None, "{question}", "", "Who (", "A", "A"),
        (None, "{question}", "", "\u8c01\uff1f", "\u5e02", "\u5e02"),  # no blanks in Chinese,
        (None, "{question}", "", "\u0e43\u0e04\u0e23", "\u0e04", "\u0e04"),  # nor in Thai,
        (None, "{question}", "", "\ub204\uad6c", "\ub098", " \ub098"),  # but in Korean
        ("any", "unused", "", "", "A", "A"),
        ("any", "unused", "It is", "", "A", " A"),
        ("any", "unused", "It is ", "", "A", "A"),
    ],
)
def test_one_gap_before_an_answer(
    template: str | None, form: str, prefix: str, question: str, answer: str, expected: str
) -> None:
    assert text_of(PromptFormat(Letters(template), form).answer(answer, prefix, question)) == expected
    assert text_of(PromptFormat(Letters(template), form, verbatim=True).answer(answer, prefix, question)) == answer


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ("three", "two"), "one "),
        ("one two two", ("two",), "one "),
        ("\none\ntwo", ("\n",), "one"),  # a newline ends nothing before something was said
        (" \n\n one\n", ("\n",), "one"),
        (" one two", (" ",), "one"),
        (" \n", ("\n",), ""),
        ("\n\nQuestion: Why?", ("\n\nQuestion:",), ""),  # that says something
        (" one two", ("four",), "one two"),
        ("\n one", (), "\n one"),
    ],
)
def test_cut(text: str, stops: tuple[str, ...], expected: str) -> None:
    assert cut_at_stop(text, stops) == expected


@given(st.text("a\n ", max_size=8), st.lists(st.sampled_from(["\n", " ", "aa", "\na"]), max_size=3))
def test_a_reply_is_cut_where_it_ended(text: str, stops: list[str]) -> None:
    """Token by token: a stop that once was found stays where it is, and a cut reply has none left."""
    ended = [at for size in range(len(text) + 1) if (at := find_stop(text[:size], stops)) is not None]
    assert (find_stop(text, stops) is not None) == bool(ended)
    assert find_stop(cut_at_stop(text, stops), stops) is None
    if stops:
        assert cut_at_stop(text, stops) == cut_at_stop(text, stops).lstrip()


def test_an_empty_question_and_answer() -> None:
    assert plain().question("").shape == (1, 0)
    assert plain().question("").dtype == torch.int64
    for empty in ("", "  ", "\u200b", " \ufeff\u2060\n"):
        with pytest.raises(EmptyTextError, match="is empty once it is tokenised"):
            plain().answer(empty)
