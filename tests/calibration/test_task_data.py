"""Calibration on the questions of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.calibration.prompts import prompts_of
from kvsearch.calibration.task_data import data_of_tasks
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.catalog import TaskOptions, find_tasks
from kvsearch.tasks.encode import encode_tasks
from tests import tiny


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded(max_position_embeddings=600)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.task_file(tmp_path / "mine.jsonl", 20, 100, 3)


def test_contexts_and_questions_are_those_of_an_evaluation(model: LoadedModel, file: Path) -> None:
    """The same token ids before every answer, cut or not."""
    tasks = find_tasks(f"jsonl:{file}+synthetic:multikey", TaskOptions(lengths=(512,), split="train"))
    data = data_of_tasks(model, tasks, 3, 1)
    assert (data.name, len(data.contexts)) == ("mine+multikey", 6)
    encoded = encode_tasks(model, tasks, 3, 1)
    asked = [(prompt, question) for task in encoded for prompt in task.prompts for question in prompt.questions]
    found = [(prompt, after) for prompt in prompts_of(model, data) for after in prompt.continuations]
    assert len(asked) == len(found) == data.questions
    for (prompt, question), (made, after) in zip(asked, found, strict=True):
        assert made.ids[0].tolist() == prompt.context.tolist()
        assert after.tokens[0, : after.answer].tolist() == question.ids.tolist()
    first = encoded[0].prompts[0].questions[0].query
    assert found[0][1].tokens[0, found[0][1].answer :].tolist() == tiny.ids_of(first.answers[0])[0, 1:].tolist()


def test_other_splits_and_seeds_are_other_contexts(model: LoadedModel, file: Path) -> None:
    """What is trained on by default is disjoint from what an evaluation asks by default, or of its report split."""

    def texts(split: str | None, seed: int = 0) -> set[str]:
        tasks = find_tasks(f"jsonl:{file}+synthetic:multikey", TaskOptions(lengths=(512,), split=split))
        return {context.text for context in data_of_tasks(model, tasks, 20, seed).contexts}

    train, report = texts("train"), texts("report")
    assert train and report and not train & report
    synthetic = find_tasks("synthetic:multikey", TaskOptions(lengths=(512,)))
    assert not train & {context.text for context in data_of_tasks(model, synthetic, 20, 0).contexts}
    assert data_of_tasks(model, synthetic, 2, 0).sha256 != data_of_tasks(model, synthetic, 2, 1).sha256


def test_questions_without_an_answer_are_left_out(model: LoadedModel) -> None:
    queries = (Query("? vote", ("", "anchor")), Query("? vote", ("",)), Query(" ", ("anchor",)), Query("? vote", ()))
    rows = (Example("listed", "0", "the calm fox .", queries), Example("listed", "1", "the calm fox .", queries[1:]))
    (context,) = data_of_tasks(model, [tiny.Listed("listed", rows)], 2, 0).contexts
    assert [(pair.question, pair.answer) for pair in context.questions] == [("? vote", "anchor")]
    with pytest.raises(UsageError, match="task listed has no question with an answer to calibrate on"):
        data_of_tasks(model, [tiny.Listed("listed", rows[1:])], 2, 0)


def test_a_length_above_the_positions(model: LoadedModel) -> None:
    tasks = find_tasks("synthetic:multikey", TaskOptions(lengths=(700,)))
    with pytest.raises(UsageError, match="makes prompts of 700 tokens, tiny takes 600: lower --length"):
        data_of_tasks(model, tasks, 1, 0)
