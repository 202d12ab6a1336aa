"""Means, paired differences and intervals, on samples made for the purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import InternalError
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import AVERAGE, MIN_CONTEXTS_FOR_INTERVAL, Row, contrast_scores, summarize
from kvsearch.runs.estimates import Difference, Estimate


def samples(
    scores: Sequence[Sequence[float]], method: str = "plan", task: str = "t", category: str = "c"
) -> list[Sample]:
    """One list of question scores per context."""
    rest = ("", False, 100, 110, 3, 10, 1.0, 10, 0.5, 0.5)
    return [
        Sample(task, category, method, "question-agnostic", str(context), question, "", score, *rest)
        for context, row in enumerate(scores)
        for question, score in enumerate(row)
    ]


def one(rows: Sequence[Row]) -> Estimate:
    (row,) = rows
    return row.scores["plan"]


def width(estimate: Estimate) -> float:
    return estimate.high - estimate.low


def test_few_contexts_have_a_mean_but_no_interval() -> None:
    contexts = MIN_CONTEXTS_FOR_INTERVAL - 1
    score = one(summarize(samples([[0.0, 1.0]] * contexts), "plan"))
    assert (score.mean, score.contexts) == (0.5, contexts)
    assert math.isnan(score.low)
    assert math.isnan(score.high)


def test_a_difference_by_hand() -> None:
    """Differences 1, 0, 0, 0, 0: variance 0.8 / 5 / 4; at the ends -1.2 and 0.8 off, a fifth of the weight each.

    Middle (0.2 + (-1 + 1) / 5) / 1.4; to either side t_6 sqrt(0.04 + (1.44 + 0.64) / 25) / 1.4.
    """
    made = samples([[1.0], *[[0.5]] * 4]) + samples([[0.0], *[[0.5]] * 4], "other")
    (row,) = summarize(made, "plan")
    low, high = pytest.approx(-0.47061, abs=1e-5), pytest.approx(0.75633, abs=1e-5)
    assert row.differences["other"] == Difference(pytest.approx(0.2), low, high, 1, 4, 0, contexts=5)
    assert contrast_scores(made, {"plan": 1.0, "other": -1.0}).low == low
    (other,) = summarize(made, "other")
    low, high = pytest.approx(-0.75633, abs=1e-5), pytest.approx(0.47061, abs=1e-5)
    assert other.differences["plan"] == Difference(pytest.approx(-0.2), low, high, 0, 4, 1, contexts=5)


def test_a_score_at_its_ceiling_by_hand() -> None:
    """Five of five contexts right, with one right and one wrong beside them: 6/7 +- t_6 * 0.2 / 1.4, cut off at 1."""
    score = one(summarize(samples([[1.0]] * 5), "plan"))
    assert score == Estimate(1.0, pytest.approx(6 / 7 - 2.44691 / 7, abs=1e-5), 1.0, contexts=5)


def test_contexts_of_several_questions_by_hand() -> None:
    """A task's mean is a ratio: contexts of 2 and 1 questions are off by s - q m, by what all questions are."""
    score = one(summarize(samples([[1.0, 1.0], [1.0, 0.0], [0.0], [1.0], [0.0]]), "plan"))
    mean = 4 / 7
    off = np.array([2 - 2 * mean, 1 - 2 * mean, -mean, 1 - mean, -mean]) / 7
    weight = 2 / 7  # of a context with two questions
    variance = (off**2).sum() * 5 / 4 + weight**2 * (mean**2 + (1 - mean) ** 2)
    middle = (mean + weight) / (1 + 2 * weight)
    reach = 2.44691 * np.sqrt(variance) / (1 + 2 * weight)
    assert (score.mean, score.low, score.high) == pytest.approx(
        (mean, middle - reach, min(middle + reach, 1)), abs=1e-5
    )


def test_tasks_by_hand() -> None:
    """The variances of two tasks are those of halves; one context alone may be anywhere on its scale."""
    made = samples([[1.0], [0.0], [1.0], [1.0]], task="some") + samples([[1.0]], task="single")
    score = summarize(made, "plan")[-1].scores["plan"]
    mean, weight = 0.875, 0.5
    variance = (0.1875 / 3 + 0.25) / 4 + weight**2 * (mean**2 + (1 - mean) ** 2)
    middle = (mean + weight) / (1 + 2 * weight)
    reach = 2.57058 * np.sqrt(variance) / (1 + 2 * weight)
    assert (score.mean, score.low, score.high) == pytest.approx((mean, middle - reach, 1.0), abs=1e-5)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=MIN_CONTEXTS_FOR_INTERVAL, max_size=12))
def test_an_interval_holds_its_mean_and_stays_on_the_scale(rows: list[list[float]]) -> None:
    score = one(summarize(samples(rows), "plan"))
    assert 0 <= score.low <= score.mean + 1e-9
    assert score.mean - 1e-9 <= score.high <= 1


def test_categories_by_hand() -> None:
    """The average is over tasks, not over categories."""
    scores = {"a": ("x", 0.2, 0.4), "b": ("y", 1.0, 0.25), "c": ("x", 0.6, 0.6)}
    made = [
        sample
        for task, (category, plan, other) in scores.items()
        for sample in samples([[plan]] * 2, "plan", task, category) + samples([[other]] * 2, "other", task, category)
    ]
    rows = summarize(made, "plan")
    assert [(row.task, row.kind, row.questions) for row in rows] == [
        ("a", "task", 2), ("b", "task", 2), ("c", "task", 2), ("x", "category", 4), ("y", "category", 2),
        ("average", "average", 6),
    ]  # fmt: skip
    means = [(round(row.scores["plan"].mean, 6), round(row.scores["other"].mean, 6)) for row in rows]
    assert means == [(0.2, 0.4), (1.0, 0.25), (0.6, 0.6), (0.4, 0.5), (1.0, 0.25), (0.6, 0.416667)]
    told = [row.differences["other"] for row in rows]
    assert [round(found.mean, 6) for found in told] == [-0.2, 0.75, 0.0, -0.1, 0.75, 0.183333]
    assert [(found.wins, found.ties, found.losses) for found in told] == [
        (0, 0, 2), (2, 0, 0), (0, 2, 0), (0, 2, 2), (2, 0, 0), (2, 2, 2),
    ]  # fmt: skip


def test_methods_must_have_answered_the_same_questions() -> None:
    with pytest.raises(InternalError, match="did not answer the same questions"):
        summarize(samples([[1.0], [1.0]]) + samples([[1.0]], "other"), "plan")
    with pytest.raises(InternalError, match="did not answer the same questions"):
        summarize(samples([[1.0]]) * 2, "plan")


def test_one_context_under_several_keys_is_one() -> None:
    """Twenty texts of five keys each are as uncertain as twenty contexts of five questions."""
    rows = [[float(i % 3 == 0), 0.5, 1.0, 0.0, 0.25] for i in range(20)]
    other = [[0.5] * 5 for _ in rows]
    by_text = samples(rows) + samples(other, "other")
    by_key = [replace(sample, key=f"{sample.key}/{sample.question}", question=0) for sample in by_text]
    contexts = {(sample.task, sample.key): sample.key.split("/")[0] for sample in by_key}
    assert summarize(by_key, "plan", contexts) == summarize(by_text, "plan")
    weights = {"plan": 1.0, "other": -1.0}
    assert contrast_scores(by_key, weights, contexts) == contrast_scores(by_text, weights)
    assert width(one(summarize(by_key, "plan", contexts))) > width(one(summarize(by_key, "plan")))


def of_categories(seed: int = 0) -> list[Sample]:
    """Contexts with one question of each of two categories, under two methods."""
    scores = np.random.default_rng(seed).random((2, 12, 2)).tolist()
    return [
        replace(sample, category="ab"[sample.question])
        for method, found in zip(("plan", "other"), scores, strict=True)
        for sample in samples(found, method)
    ]


def test_categories_within_a_task() -> None:
    """Each is what a task of its questions alone would be; the task is the mean of all of its questions."""
    mixed = of_categories()
    task, first, second, whole = summarize(mixed, "plan")
    assert [(row.task, row.kind, row.questions) for row in (task, first, second)] == [
        ("t", "task", 24), ("a", "category", 12), ("b", "category", 12)
    ]  # fmt: skip
    assert whole == replace(task, task=AVERAGE, kind="average")
    for row in (first, second):
        (alone,) = summarize([sample for sample in mixed if sample.category == row.task], "plan")
        assert (row.scores, row.differences) == (alone.scores, alone.differences)
    assert task.scores["plan"].mean == pytest.approx((first.scores["plan"].mean + second.scores["plan"].mean) / 2)
