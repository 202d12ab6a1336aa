"""The prompts of a calibration under both protocols, and what may follow them."""

from __future__ import annotations

import pytest
import torch

from kvsearch.calibration.prompts import Continuation, check_lengths, prompts_of
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import create_policy
from tests import tiny

POLICY = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
DATA = tiny.calibration_data(60, 90, questions=2)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


def ids(text: str, first: bool = False) -> list[int]:
    found: list[int] = tiny.ids_of(text)[0].tolist()
    return found if first else found[1:]  # <bos> starts contexts only


def test_a_context_is_a_prompt(model: LoadedModel) -> None:
    prompts = prompts_of(model, DATA)
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
    prompts = prompts_of(model, DATA, "question-aware")
    assert [prompt.context for prompt in prompts] == [0, 0, 1, 1]
    pairs = [(context, pair) for context in DATA.contexts for pair in context.questions]
    for prompt, (context, pair) in zip(prompts, pairs, strict=True):
        assert prompt.ids.tolist() == [ids(context.text, first=True) + ids(pair.question)]
        assert [after.tokens.tolist() for after in prompt.continuations] == [[ids(pair.answer)]]


def test_both_protocols_read_the_same_tokens(model: LoadedModel) -> None:
    def whole(protocol: str) -> list[list[int]]:
        prompts = prompts_of(model, DATA, protocol)  # type: ignore[arg-type]
        return [torch.cat([p.ids, after.tokens], 1)[0].tolist() for p in prompts for after in p.continuations]

    assert whole("question-agnostic") == whole("question-aware")


def test_the_template_leads_to_the_reply_in_the_prompt(model: LoadedModel) -> None:
    chat = LoadedModel("chat", model.model, tiny.chat_tokenizer(), model.fingerprint)
    aware = prompts_of(chat, DATA, "question-aware")[0]
    agnostic = prompts_of(chat, DATA)[0]
    assert aware.ids[0, -2:].tolist() == ids("mark =")
    assert aware.ids[0, : agnostic.length].tolist() == agnostic.ids[0].tolist()


def test_answers_are_cut(model: LoadedModel) -> None:
    assert [after.predicted for after in prompts_of(model, DATA, answer_tokens=1)[0].continuations] == [1, 1]
    assert prompts_of(model, DATA, "question-aware", 2)[0].continuations[0].tokens.shape == (1, 2)


@pytest.mark.parametrize(
    ("tokens", "answer", "rows"), [(5, 3, [2, 3]), (5, 0, [0, 1, 2, 3]), (5, 1, [0, 1, 2, 3]), (1, 0, []), (2, 0, [0])]
)
def test_rows_that_predict_the_answer(tokens: int, answer: int, rows: list[int]) -> None:
    after = Continuation(torch.zeros(1, tokens), answer)
    assert list(range(tokens))[after.predicting] == rows
    assert after.predicted == len(rows)


def test_lengths(model: LoadedModel) -> None:
    prompts = prompts_of(model, DATA)
    check_lengths(model, prompts, POLICY, lambda length: 6)
    least = prompts[0].length
    with pytest.raises(
        UsageError, match=rf"prompt of {least} tokens is too short for snapkv: 40 entries .* 160 tokens"
    ):
        check_lengths(model, prompts, POLICY, lambda length: 40)
    wide = create_policy("snapkv", {"sinks": 40})
    with pytest.raises(UsageError, match=r"72 entries are always kept.* at least 288 tokens"):
        check_lengths(model, prompts, wide, lambda length: min(length, 72))


def test_what_fits_the_model() -> None:
    prompts = prompts_of(tiny.loaded(), DATA)
    longest = prompts[1].length
    alone = tiny.loaded(max_position_embeddings=longest)
    check_lengths(alone, prompts, POLICY, lambda length: 6, followed=False)
    with pytest.raises(IncompatibleError, match=rf"has {longest} tokens and up to \d+ of question and answer: tiny"):
        check_lengths(alone, prompts, POLICY, lambda length: 6)
    small = tiny.loaded(max_position_embeddings=longest - 1)
    with pytest.raises(IncompatibleError, match=rf"has {longest} tokens: tiny takes at most {longest - 1}"):
        check_lengths(small, prompts, POLICY, lambda length: 6, followed=False)
