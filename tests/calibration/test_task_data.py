"""Calibration on the questions of tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvsearch.calibration.lukv import estimate_replies
from kvsearch.calibration.options import LukvOptions
from kvsearch.calibration.prompts import add_own_replies, encode_prompts, make_task_data
from kvsearch.calibration.steps import StepCache
from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.replay.forced_answers import forced_answers
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.encode import encode_tasks, list_context_hashes
from tests import tiny


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded(max_position_embeddings=600)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.task_file(tmp_path / "mine.jsonl", 20, 100, 3)


def test_contexts_and_questions_are_those_of_an_evaluation(model: LoadedModel, file: Path) -> None:
    """The same token ids before every answer, cut or not."""
    tasks = find_tasks(f"jsonl:{file}+synthetic:multikey", {"length": (512,), "split": "train"})
    data = make_task_data(model, tasks, 3, 1)
    assert (data.name, len(data.contexts)) == ("mine+multikey", 6)
    encoded = encode_tasks(model, tasks, 3, 1)
    asked = [(prompt, question) for task in encoded for prompt in task.prompts for question in prompt.questions]
    found = [(prompt, after) for prompt in encode_prompts(model, data) for after in prompt.continuations]
    assert len(asked) == len(found) == data.questions
    for (prompt, question), (made, after) in zip(asked, found, strict=True):
        assert made.ids[0].tolist() == prompt.context.tolist()
        assert after.tokens[0, : after.answer].tolist() == question.ids.tolist()
    first = encoded[0].prompts[0].questions[0].query
    assert found[0][1].tokens[0, found[0][1].answer :].tolist() == tiny.ids_of(first.answers[0])[0, 1:].tolist()


def test_questions_without_an_answer_are_left_out(model: LoadedModel) -> None:
    queries = (Query("? vote", ("", "anchor")), Query("? vote", ("",)), Query(" ", ("anchor",)), Query("? vote", ()))
    rows = (Example("listed", "0", "the calm fox .", queries), Example("listed", "1", "the calm fox .", queries[1:]))
    (context,) = make_task_data(model, [tiny.Listed("listed", rows)], 2, 0).contexts
    assert [(pair.question, pair.answer) for pair in context.questions] == [("? vote", "anchor")]
    with pytest.raises(UsageError, match="task listed has no question with an answer to calibrate on"):
        make_task_data(model, [tiny.Listed("listed", rows[1:])], 2, 0)


def test_all_answers_are_forced_in_the_form_of_the_task(model: LoadedModel, tmp_path: Path) -> None:
    """As evaluations take them: in full, and as far as a reply may go."""
    for metric in ("string_match_all", "exact"):
        row = {"context": "the calm fox .", "question": "? vote", "answers": ["anchor", "green"], "metric": metric}
        (tmp_path / f"{metric}.jsonl").write_text(json.dumps(row))
    tasks = find_tasks(f"jsonl:{tmp_path}/string_match_all.jsonl+jsonl:{tmp_path}/exact.jsonl")
    encoded = encode_tasks(model, tasks, 2)
    right = [question.right.tolist() for task in encoded for prompt in task.prompts for question in prompt.questions]
    prompts = encode_prompts(model, make_task_data(model, tasks, 2, 0))
    found = [after.tokens[0, after.answer :].tolist() for prompt in prompts for after in prompt.continuations]
    assert found == right
    assert len(found[0]) > len(found[1]) == 1


class _Judged(tiny.Listed):
    """Replies that begin like the answer are right."""

    def score(self, reply: str, query: Query) -> float:
        return float(reply.split()[:1] == query.answers[0].split()[:1])


def test_own_replies_are_those_of_an_evaluation(model: LoadedModel) -> None:
    """Where the metric takes them for right, and no longer than a reply may be; else the given ones."""
    rows = tiny.listed((60, 3), (90, 2)).rows
    free = tiny.Listed("free", rows)
    whole = {
        (one.key, one.question): one.reply.split()
        for one in tiny.run(model, {"full": make_full_program(model.model)}, [free], 2)
    }
    right = tuple(
        replace(row, queries=tuple(
            replace(query, answers=(whole[row.key, number][0] if number % 2 == 0 else "lantern",))
            for number, query in enumerate(row.queries)
        ))
        for row in rows
    )  # fmt: skip
    task = _Judged("judged", right)
    data = make_task_data(model, [task], 2, 0)
    forced = forced_answers(model, encode_tasks(model, [task], 2), QUESTION_AGNOSTIC, "own")
    assert {answer.own for answer in forced.values()} == {True, False}
    prompts = list(add_own_replies(model, [encode_prompts(model, data)], 128))
    found = [after.tokens[0, after.answer :].tolist() for prompt in prompts for after in prompt.continuations]
    assert found == [answer.ids.tolist() for answer in forced.values()]
    short = next(add_own_replies(model, [encode_prompts(model, data)], 2)).continuations[0]
    assert short.tokens[0, short.answer :].tolist() == forced["judged", "0", 0].ids[:2].tolist()


def test_texts_have_no_replies_and_none_are_forecast(model: LoadedModel, file: Path, tmp_path: Path) -> None:
    """Their answers go on with the text: no prompt is read for a reply, also where all of them are texts."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(tiny.document(400, seed).words[1:]) for seed in range(20)))
    tasks = find_tasks(f"jsonl:{file}+ppl:{text}", {"length": (256,), "split": "train"})
    options = LukvOptions()
    for chosen, replying in ((tasks, 2), (tasks[1:], 0)):
        prompts = encode_prompts(model, make_task_data(model, chosen, 2, 0))
        directory = tmp_path / f"{replying} replying"
        directory.mkdir()
        assert sum(prompt.may_reply for prompt in prompts) == replying
        tokens = []
        for _ in range(2):  # and the same from stored steps
            replied = list(add_own_replies(model, [prompts], 4, StepCache(directory)))
            assert all(
                answered is prompt for prompt, answered in zip(prompts, replied, strict=True) if not prompt.may_reply
            )
            tokens.append([after.tokens.tolist() for prompt in replied for after in prompt.continuations])
        assert tokens[0] == tokens[1]
        alone = [prompt for prompt in prompts if prompt.may_reply]
        assert estimate_replies(prompts, options) == estimate_replies(alone, options)
        assert bool(estimate_replies(prompts, options).tokens) == bool(replying)


def test_equal_contexts_are_known_with_their_questions(model: LoadedModel) -> None:
    """As evaluations know them: worked examples before every problem do not make all problems one."""
    text = "the calm fox ."
    rows = tuple(
        Example("listed", str(number), text, (Query(question, ("anchor",)),))
        for number, question in enumerate(("? vote", "? green", "? calm"))
    )
    task = tiny.Listed("listed", rows)
    data = make_task_data(model, [task], 3, 0)
    assert data.hashes == list_context_hashes(encode_tasks(model, [task], 3))
    assert len(data.asked.ids) == 3
    fresh = encode_tasks(
        model,
        [tiny.Listed("listed", (*rows, replace(rows[0], key="3", queries=(Query("? new", ("fox",)),))))],
        4,
        used=data.asked,
    )
    assert [prompt.key for prompt in fresh[0].prompts] == ["3"]
