"""The prompts of a calibration under both protocols, and what may follow them."""

from __future__ import annotations

import pytest
import torch

from kvsearch.calibration.data import CalibrationData, Context, Pair
from kvsearch.calibration.prompts import check_lengths, encode_prompts
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import create_policy
from tests import tiny

POLICY = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
DATA = tiny.calibration_data(60, 90, questions=2)


def ids(text: str, first: bool = False) -> list[int]:
    found: list[int] = tiny.ids_of(text)[0].tolist()
    return found if first else found[1:]  # <bos> starts contexts only


def test_a_context_is_a_prompt(model: LoadedModel) -> None:
    prompts = encode_prompts(model, DATA)
    assert [prompt.context for prompt in prompts] == [0, 1]
    for prompt, context in zip(prompts, DATA.contexts, strict=True):
        assert prompt.ids.tolist() == [ids(context.text, first=True)]
        assert prompt.length == len(context.text.split()) + 1
        for after, pair in zip(prompt.continuations, context.questions, strict=True):
            asked, answer = ids(pair.question), ids(pair.answer)
            assert after.tokens.tolist() == [asked + answer]
            assert after.answer == len(asked)
            assert after.predicted == len(answer)
            assert list(range(len(asked + answer)))[after.predicting] == list(
                range(len(asked) - 1, len(asked + answer) - 1)
            )


def test_a_context_with_a_question_is_a_prompt(model: LoadedModel) -> None:
    prompts = encode_prompts(model, DATA, "question-aware")
    assert [prompt.context for prompt in prompts] == [0, 0, 1, 1]
    pairs = [(context, pair) for context in DATA.contexts for pair in context.questions]
    for prompt, (context, pair) in zip(prompts, pairs, strict=True):
        assert prompt.ids.tolist() == [ids(context.text, first=True) + ids(pair.question)]
        assert [after.tokens.tolist() for after in prompt.continuations] == [[ids(pair.answer)]]


def test_the_template_leads_to_the_reply_in_the_prompt(model: LoadedModel) -> None:
    chat = LoadedModel("chat", model.model, tiny.chat_tokenizer(), model.fingerprint)
    aware = encode_prompts(chat, DATA, "question-aware", answer_tokens=1)[0]
    agnostic = encode_prompts(chat, DATA)[0]
    assert aware.ids[0, -2:].tolist() == ids("mark =")
    assert aware.ids[0, : agnostic.length].tolist() == agnostic.ids[0].tolist()
    assert aware.continuations[0].tokens.shape == (1, 1)


def test_lengths(model: LoadedModel) -> None:
    prompts = encode_prompts(model, DATA)
    check_lengths(prompts, POLICY, lambda length: 6)
    least = prompts[0].length
    with pytest.raises(
        UsageError, match=rf"prompt of {least} tokens is too short for snapkv: 40 entries .* 160 tokens"
    ):
        check_lengths(prompts, POLICY, lambda length: 40)


@pytest.mark.parametrize("by", ["positions", "max_length"])
def test_what_does_not_fit_is_cut_in_the_middle(by: str) -> None:
    full = encode_prompts(tiny.loaded(), DATA)
    whole = full[1].length
    limit = whole + max(after.tokens.shape[1] for after in full[1].continuations)
    assert encode_prompts(tiny.loaded(max_position_embeddings=limit), DATA)[1].length == whole
    small = tiny.loaded(max_position_embeddings=limit - 9) if by == "positions" else tiny.loaded()
    words = f"the middle of 1 of 2 calibration contexts was cut out, .* fit {limit - 9} tokens: .* --data, .* --tasks"
    with pytest.warns(KvsearchWarning, match=words):
        cut = encode_prompts(small, DATA, max_length=None if by == "positions" else limit - 9)
    assert cut[0].ids.tolist() == full[0].ids.tolist()
    assert cut[1].length == whole - 9
    tail = (whole - 9 - 1) // 2  # <bos> is no part of the text
    assert cut[1].ids[0, -tail:].tolist() == full[1].ids[0, -tail:].tolist()
    assert cut[1].ids[0, :-tail].tolist() == full[1].ids[0, : whole - 9 - tail].tolist()
    for before, after in zip(full[1].continuations, cut[1].continuations, strict=True):
        assert torch.equal(before.tokens, after.tokens)


def test_an_answer_without_a_token_and_a_question_that_leaves_no_room(model: LoadedModel) -> None:
    blank = Context(DATA.contexts[0].text, (Pair.model_construct(question="? vote", answer=" "),))
    with pytest.raises(UsageError, match="the answer ' ' is empty"):
        encode_prompts(model, CalibrationData("x", " {question}", (*DATA.contexts, blank), "0"))
    with pytest.raises(IncompatibleError, match=r"^calibration context 0: .* within 7 tokens: raise --max-length, or"):
        encode_prompts(tiny.loaded(), DATA, max_length=7)


def test_a_context_with_a_form_of_its_own(model: LoadedModel) -> None:
    """Its prompt and the beginning of its replies; room is left for a reply of the length that a task allows."""
    pair = Pair(question="? vote", answer="anchor", prefix=" code", max_new_tokens=30)
    context = Context(DATA.contexts[0].text, (pair,), " mark {question}", chat=False)
    chat = LoadedModel("chat", model.model, tiny.chat_tokenizer(), model.fingerprint)
    data = CalibrationData("x", " {question}", (context,), "0")
    for loaded in (model, chat):
        (prompt,) = encode_prompts(loaded, data)
        assert prompt.continuations[0].tokens[0].tolist() == ids("mark ? vote code anchor")
    with pytest.warns(KvsearchWarning, match="cut out"):
        (prompt,) = encode_prompts(model, data, max_length=60)
    assert prompt.length == 60 - 4 - 30
