"""What is teacher-forced after a question: the model's own reply where it is right, else the right one as given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvsearch.core.errors import IncompatibleError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import QUESTION_AGNOSTIC, QUESTION_AWARE, Protocol
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.replay.forced_answers import (
    EXTRA_TOKENS,
    TOGETHER,
    Asked,
    ForcedAnswer,
    forced_answers,
    limit_own_reply,
)
from kvsearch.tasks.base import Answers, Task
from kvsearch.tasks.encode import encode_tasks
from tests import tiny
from tests.combinations import in_turn

MANY = tiny.listed((60, 3), (90, 1), *[(50, 2)] * TOGETHER)  # two batches
FEW = tiny.listed((60, 3), (90, 1))  # several questions of a context side by side
PROTOCOLS = QUESTION_AGNOSTIC, QUESTION_AWARE


def decided(
    model: LoadedModel, *tasks: Task, protocol: Protocol = QUESTION_AGNOSTIC, answers: Answers = "own"
) -> dict[Asked, ForcedAnswer]:
    return forced_answers(model, encode_tasks(model, tasks, 100), protocol, answers)


def said(model: LoadedModel, task: tiny.Listed, protocol: Protocol = QUESTION_AGNOSTIC) -> dict[Asked, str]:
    """What an evaluation finds the model to reply under its full cache, one context at a time."""
    samples = tiny.run(model, {"full": make_full_program(model.model)}, [task], 100, batch=1, protocol=protocol)
    return {(one.task, one.key, one.question): one.reply for one in samples}


def with_answers(task: tiny.Listed, answers: dict[Asked, tuple[str, ...]], **changes: object) -> tiny.Listed:
    rows = tuple(
        replace(row, queries=tuple(
            replace(query, answers=answers.get((task.name, row.key, number), query.answers), **changes)  # type: ignore[arg-type]
            for number, query in enumerate(row.queries)
        ))
        for row in task.rows
    )  # fmt: skip
    return replace(task, rows=rows)


def texts(model: LoadedModel, found: dict[Asked, ForcedAnswer]) -> dict[Asked, str]:
    decode = model.tokenizer.decode
    return {asked: decode(answer.ids, skip_special_tokens=True) for asked, answer in found.items()}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded(tie_word_embeddings=False)


@in_turn(protocol=PROTOCOLS, task=[MANY, FEW])
def test_own_replies_are_those_of_an_evaluation(model: LoadedModel, task: tiny.Listed, protocol: Protocol) -> None:
    expected = said(model, task, protocol)
    right = with_answers(task, {asked: (reply,) for asked, reply in expected.items()})
    found = decided(model, right, protocol=protocol)
    assert texts(model, found) == expected
    assert all(answer.own for answer in found.values())


def test_a_reply_that_is_not_right_is_replaced(model: LoadedModel) -> None:
    expected, first = said(model, FEW), ("listed", "0", 0)
    found = decided(model, with_answers(FEW, {first: (expected[first],)}))
    assert {asked for asked, answer in found.items() if answer.own} == {first}
    given = texts(model, decided(model, FEW, answers="given"))
    assert texts(model, found) == {**given, first: expected[first]}


def test_half_of_the_answers_are_not_enough(model: LoadedModel) -> None:
    """Then all of them are forced, in the form of the task, as far as a reply may go."""
    expected, first = said(model, FEW), ("listed", "0", 0)
    both = (expected[first].split()[0], "lantern")
    task = replace(with_answers(FEW, {first: both}, written="lantern green lantern ."), metric="string_match_all")
    answer = decided(model, task)[first]
    assert not answer.own
    assert FEW.rows[0].queries[0].max_new_tokens == 3
    assert model.tokenizer.decode(answer.ids) == "lantern green lantern"


def test_an_own_reply_is_little_longer_than_the_right_one(model: LoadedModel) -> None:
    """Of a reply that is allowed 100 tokens, 3 + 32 are made where the right one has 3."""
    assert limit_own_reply(3, 100) == 3 + EXTRA_TOKENS == 35
    assert limit_own_reply(3, 20) == 20
    assert limit_own_reply(0, 100) == 100  # no right reply says how long it is
    lengths: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda _, __, given: lengths.append(given["attention_mask"].shape[1]), with_kwargs=True
    )
    task = with_answers(tiny.listed((40, 1)), {("listed", "0", 0): ("lantern green lantern",)}, max_new_tokens=100)
    with handle:
        decided(model, task)
    assert max(lengths) == lengths[1] + 34  # the last token of a reply is not read


def test_the_question_under_which_a_model_computes_nan_is_named() -> None:
    model = tiny.loaded()
    with torch.no_grad():
        model.model.lm_head.weight[0] = float("nan")
    with pytest.raises(IncompatibleError, match="task listed, example 0: the model emits NaN"):
        decided(model, FEW)
