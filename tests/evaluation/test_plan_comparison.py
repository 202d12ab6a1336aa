"""Trials: plans that are the same run once, and what some gain on others is the plain paired mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import InternalError, UsageError
from kvsearch.evaluation.compare import Settings
from kvsearch.evaluation.plan_comparison import PlanComparison, PlanEvaluation, prepare_plans
from kvsearch.evaluation.samples import Cost, Sample
from kvsearch.evaluation.statistics import contrast, summarize
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan, Size
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.compared import sweep
from kvsearch.strategies.method_list import find_methods
from kvsearch.tasks.base import Query
from tests import tiny
from tests.examples import at_most

FLAT, STEEP = [[15, 15]] * 4, [[9, 9], [21, 21]] * 2


@dataclass(frozen=True)
class Lottery(tiny.Listed):
    """Any reply has some score: a random model's are never right."""

    def score(self, reply: str, query: Query) -> float:
        return sum(map(ord, reply)) % 11 / 10


def lottery(name: str, *shapes: tuple[int, int]) -> Lottery:
    return Lottery(name, tiny.listed(*shapes, name=name).rows)


TASKS = [lottery("one", (60, 2), (48, 1), (70, 3)), lottery("two", (66, 2), (52, 1))]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


def prepared(model: LoadedModel, plans: Mapping[str, Plan]) -> PlanEvaluation:
    return prepare_plans(model, plans, TASKS, Settings(3, seed=4, batch=2))


@pytest.fixture(scope="module")
def result(model: LoadedModel) -> PlanComparison:
    flat, steep = tiny.plan_for(model, FLAT), tiny.plan_for(model, STEEP)
    again = flat.model_copy(update={"provenance": flat.provenance.model_copy(update={"method": "other", "seed": 99})})
    return prepared(model, {"flat": flat, "again": again, "steep": steep}).run()


def scores(result: PlanComparison, label: str, task: str) -> list[float]:
    return [sample.score for sample in result.comparison.samples if (sample.method, sample.task) == (label, task)]


def test_equal_plans_run_once(result: PlanComparison) -> None:
    assert result.comparison.labels == ["full", "flat", "steep"]
    assert result.labels == {"full": "full", "flat": "flat", "again": "flat", "steep": "steep"}
    assert result.score("again") == result.score("flat")
    assert len(result.comparison.samples) == 3 * sum(task.questions for task in result.comparison.coverage)


def test_scores_are_means_over_tasks(result: PlanComparison) -> None:
    assert result.tasks == ("one", "two")
    for name, label in result.labels.items():
        by_task = {task: fmean(scores(result, label, task)) for task in result.tasks}
        assert result.by_task(name) == pytest.approx(by_task)
        assert result.score(name).mean == pytest.approx(fmean(by_task.values()))
    assert result.score("flat").mean != result.score("steep").mean  # else these tests would say nothing


def test_a_gain_is_the_paired_mean(result: PlanComparison) -> None:
    mine, theirs = ([np.array(scores(result, label, task)) for task in result.tasks] for label in ("flat", "steep"))
    differences = [one - other for one, other in zip(mine, theirs, strict=True)]
    found = result.gain("again", ["steep"])
    assert found.mean == pytest.approx(fmean(each.mean() for each in differences))
    signs = np.sign(np.concatenate(differences))
    assert (found.wins, found.ties, found.losses) == tuple(int((signs == sign).sum()) for sign in (1, 0, -1))


def test_a_gain_on_several_is_that_on_their_mean(result: PlanComparison) -> None:
    """One of them is the strategy itself, under another name."""
    found, alone = result.gain("flat", ["steep", "again", "full"]), result.gain("flat", ["steep"])
    assert found.mean == pytest.approx((alone.mean + 0 + result.gain("flat", ["full"]).mean) / 3)
    assert found.low <= found.mean <= found.high


def test_nothing_is_gained_on_oneself(result: PlanComparison) -> None:
    questions = sum(task.questions for task in result.comparison.coverage)
    assert result.gain("flat", ["again"]) == Difference(0.0, 0.0, 0.0, 0, questions, 0)


def test_methods_of_another_size_have_scores_too(model: LoadedModel) -> None:
    others = sweep(model, find_methods("streaming", []), [Size(9)])[1:]
    found = prepare_plans(model, {"flat": tiny.plan_for(model, FLAT)}, TASKS, Settings(2, batch=2), others).run()
    assert found.score("streaming@9").mean == pytest.approx(fmean(found.by_task("streaming@9").values()))
    assert found.score("flat").mean == pytest.approx(fmean(found.by_task("flat").values()))
    assert found.gain("flat", ["streaming@9"]).mean == pytest.approx(
        found.score("flat").mean - found.score("streaming@9").mean
    )


def test_names_are_taken_once(model: LoadedModel) -> None:
    plan = tiny.plan_for(model, FLAT)
    with pytest.raises(UsageError, match="are called 'full'"):
        prepared(model, {"full": plan})
    others = sweep(model, find_methods("streaming", []), [Size(9)])[1:]
    with pytest.raises(UsageError, match="are called 'streaming@9'"):
        prepare_plans(model, {"streaming@9": plan}, TASKS, Settings(2), others)


# --- contrasts -------------------------------------------------------------------------------------------------------


def samples(scores: Sequence[Sequence[float]], method: str, task: str = "t") -> list[Sample]:
    """A list of question scores per context."""
    rest = ("", False, 100, 110, 3, *Cost(10, 1.0, 10, 0.5, 0.5))
    return [
        Sample(task, "c", method, "question-agnostic", str(context), question, "", score, *rest)
        for context, row in enumerate(scores)
        for question, score in enumerate(row)
    ]


def test_a_contrast_by_hand() -> None:
    """Task t: differences .5 - (.1 + .3) / 2 and 1 - (0 + .6) / 2; task u: 0 - (.2 + .2) / 2. Tasks weigh the same."""
    asked = [
        *samples([[0.5], [1.0]], "a"), *samples([[0.1], [0.0]], "b"), *samples([[0.3], [0.6]], "c"),
        *samples([[0.0]], "a", "u"), *samples([[0.2]], "b", "u"), *samples([[0.2]], "c", "u"),
        *samples([[0.9], [0.9]], "unasked"),
    ]  # fmt: skip
    found = contrast(asked, {"a": 1.0, "b": -0.5, "c": -0.5})
    assert found.mean == pytest.approx(((0.3 + 0.7) / 2 - 0.2) / 2)
    assert (found.wins, found.ties, found.losses) == (2, 0, 1)
    assert (found.low, found.high) == pytest.approx(((0.3 - 0.2) / 2, (0.7 - 0.2) / 2))


scored = st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=2), min_size=1, max_size=6)


@at_most(30)
@given(scored)
def test_a_contrast_of_two_is_their_difference(rows: list[list[float]]) -> None:
    shuffled = [list(reversed(row)) for row in reversed(rows)]
    asked = [*samples(rows, "a"), *samples(shuffled, "b")]
    found = contrast(asked, {"a": 1.0, "b": -1.0}, seed=3)
    wanted = summarize(asked, "a", seed=3)[0].differences["b"]
    assert (found.mean, found.low, found.high) == pytest.approx((wanted.mean, wanted.low, wanted.high), abs=1e-9)
    assert (found.wins, found.ties, found.losses) == (wanted.wins, wanted.ties, wanted.losses)
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    turned = contrast(asked, {"a": -1.0, "b": 1.0}, seed=3)
    assert (turned.mean, turned.low, turned.high) == pytest.approx((-found.mean, -found.high, -found.low), abs=1e-9)


def test_methods_that_were_not_asked_the_same() -> None:
    asked = samples([[0.5], [1.0]], "a")
    with pytest.raises(InternalError, match="did not answer the same questions"):
        contrast([*asked, *(replace(one, method="b") for one in asked[:1])], {"a": 1.0, "b": -1.0})
