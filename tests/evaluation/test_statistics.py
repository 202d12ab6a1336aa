"""Means, paired differences and intervals, on samples made for the purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import InternalError
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import AVERAGE, Row, contrast, summarize
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


def test_the_interval_of_a_coin() -> None:
    """400 contexts, half of them right: 0.5 +- 1.96 * 0.5 / 20."""
    found = one(summarize(samples([[float(i % 2)] for i in range(400)]), "plan"))
    assert found.mean == 0.5
    assert (found.low, found.high) == pytest.approx((0.451, 0.549), abs=0.006)


def test_contexts_are_the_clusters() -> None:
    """Twenty contexts of twenty questions that agree are twenty observations, not four hundred."""
    agreeing = one(summarize(samples([[float(i % 2)] * 20 for i in range(20)]), "plan"))
    assert width(agreeing) == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(20), rel=0.15)
    mixed = one(summarize(samples([[0.0, 1.0] * 10] * 20), "plan"))
    assert (mixed.mean, width(mixed)) == (0.5, 0.0)


def test_questions_weigh_the_same_in_contexts_of_any_size() -> None:
    found = summarize(samples([[1.0] * 9, [0.0]]), "plan")[0]
    assert (found.questions, found.scores["plan"].mean) == (10, 0.9)
    assert (found.scores["plan"].low, found.scores["plan"].high) == (0.0, 1.0)


def test_one_context_has_a_mean_but_no_spread() -> None:
    assert one(summarize(samples([[0.0, 1.0]]), "plan")) == Estimate(0.5, 0.5, 0.5)


def paired(change: Callable[[float], float], seed: int = 0) -> Row:
    scores = np.random.default_rng(seed).random((30, 2)).tolist()
    other = [[change(score) for score in row] for row in scores]
    return summarize(samples(scores) + samples(other, "other"), "plan")[0]


def test_identical_methods_do_not_differ() -> None:
    row = paired(lambda score: score)
    assert row.differences == {"other": Difference(0.0, 0.0, 0.0, 0, 60, 0)}
    assert row.scores["plan"] == row.scores["other"]
    assert width(row.scores["plan"]) > 0.05


def test_a_constant_difference_is_certain() -> None:
    """Paired: what makes a context hard is hard for both methods."""
    difference = paired(lambda score: score - 0.125).differences["other"]
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.125, 0.125, 0.125))


def test_the_seed_decides() -> None:
    made = samples(np.random.default_rng(0).random((15, 1)).tolist())
    assert summarize(made, "plan", 3) == summarize(made, "plan", 3)
    assert summarize(made, "plan", 3) != summarize(made, "plan", 4)
    state = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global generator is what must not move
    summarize(made, "plan", 3)
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_the_average_is_over_tasks() -> None:
    """A task of many questions does not outweigh a task of few."""
    many, few = samples([[1.0] * 4] * 10, task="many"), samples([[0.0]] * 3, task="few")
    rows = summarize(many + few, "plan")
    assert [(row.task, row.questions) for row in rows] == [("many", 40), ("few", 3), (AVERAGE, 43)]
    assert rows[-1].scores["plan"] == Estimate(0.5, 0.5, 0.5)


# --- worked by hand --------------------------------------------------------------------------------------------------


def test_a_difference_by_hand() -> None:
    """Context A: 1, 0 against 0, 0; context B: 0.5 against 0.5. Resamples: A A 2/4, A B and B A 1/3, B B 0."""
    made = samples([[1.0, 0.0], [0.5]]) + samples([[0.0, 0.0], [0.5]], "other")
    (row,) = summarize(made, "plan")
    assert row.differences["other"] == Difference(pytest.approx(1 / 3), 0.0, 0.5, 1, 2, 0)
    assert row.scores["plan"] == Estimate(0.5, 0.5, 0.5)  # 2/4, 1.5/3 and 1/2
    assert row.scores["other"] == Estimate(pytest.approx(0.5 / 3), 0.0, 0.5)
    (other,) = summarize(made, "other")
    assert other.differences["plan"] == Difference(pytest.approx(-1 / 3), -0.5, 0.0, 0, 2, 1)


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
    assert [round(row.scores["plan"].mean, 6) for row in rows] == [
        0.2,
        1.0,
        0.6,
        0.4,
        1.0,
        0.6,
    ]  # the average: of tasks
    assert [round(row.scores["other"].mean, 6) for row in rows] == [0.4, 0.25, 0.6, 0.5, 0.25, 0.416667]
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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12))
def test_wins_and_losses_mirror_each_other(pairs: list[tuple[int, int]]) -> None:
    made = samples([[a / 2] for a, _ in pairs]) + samples([[b / 2] for _, b in pairs], "other")
    mine, theirs = summarize(made, "plan")[0].differences["other"], summarize(made, "other")[0].differences["plan"]
    assert (mine.wins, mine.ties, mine.losses) == (theirs.losses, theirs.ties, theirs.wins)
    assert mine.wins + mine.ties + mine.losses == len(pairs)
    assert (mine.mean, mine.low, mine.high) == pytest.approx((-theirs.mean, -theirs.high, -theirs.low))


def test_one_context_under_several_keys_is_drawn_as_one() -> None:
    """Twenty texts of five keys each are as uncertain as twenty contexts of five questions, with the same draws."""
    rows = [[float(i % 3 == 0), 0.5, 1.0, 0.0, 0.25] for i in range(20)]
    other = [[0.5] * 5 for _ in rows]
    by_text = samples(rows) + samples(other, "other")
    by_key = [replace(sample, key=f"{sample.key}/{sample.question}", question=0) for sample in by_text]
    contexts = {(sample.task, sample.key): sample.key.split("/")[0] for sample in by_key}
    assert summarize(by_key, "plan", 3, contexts) == summarize(by_text, "plan", 3)
    weights = {"plan": 1.0, "other": -1.0}
    assert contrast(by_key, weights, 3, contexts) == contrast(by_text, weights, 3)
    assert width(one(summarize(by_key, "plan", 3, contexts))) != width(one(summarize(by_key, "plan", 3)))


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
        assert row.scores["plan"].mean == alone.scores["plan"].mean
        assert row.differences["other"].mean == alone.differences["other"].mean
        assert width(row.scores["plan"]) == pytest.approx(width(alone.scores["plan"]), rel=0.2)
    assert task.scores["plan"].mean == pytest.approx((first.scores["plan"].mean + second.scores["plan"].mean) / 2)
