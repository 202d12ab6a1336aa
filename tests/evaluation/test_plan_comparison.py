"""Trials: plans that are the same run once, and what some gain on others is the plain paired mean."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import Evaluation, Split, prepare_plans
from kvsearch.evaluation.statistics import contrast_scores
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from tests import tiny
from tests.evaluation.test_statistics import samples

FLAT, STEEP = [[15, 15]] * 4, [[9, 9], [21, 21]] * 2


def lottery(name: str, *shapes: tuple[int, int]) -> tiny.Lottery:
    return tiny.Lottery(name, tiny.listed(*shapes, name=name).rows)


TASKS = [lottery("one", (60, 2), (48, 1), (70, 3)), lottery("two", (66, 2), (52, 1))]


def prepared(model: LoadedModel, plans: Mapping[str, Plan]) -> Evaluation:
    return prepare_plans(model, plans, Split(TASKS, 3, seed=4, batch=2))


@pytest.fixture(scope="module")
def result(model: LoadedModel) -> Evaluation:
    flat, steep = tiny.plan_for(model, FLAT), tiny.plan_for(model, STEEP)
    again = flat.model_copy(update={"provenance": flat.provenance.model_copy(update={"method": "other", "seed": 99})})
    return prepared(model, {"flat": flat, "again": again, "steep": steep}).run()


def test_equal_plans_run_once(result: Evaluation) -> None:
    assert result.labels == ["full", "flat", "steep"]
    assert result.names == {"full": "full", "flat": "flat", "again": "flat", "steep": "steep"}
    assert result.score("again") == result.score("flat") != result.score("steep")
    gain = result.gain("again", ["steep"])
    assert gain == result.gain("flat", ["steep"])
    assert gain.mean == pytest.approx(result.score("flat").mean - result.score("steep").mean)
    assert len(result.samples) == 3 * sum(task.questions for task in result.coverage)


def test_names_are_taken_once(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="are called 'full'"):
        prepared(model, {"full": tiny.plan_for(model, FLAT)})


def test_a_contrast_by_hand() -> None:
    """Task t: differences .5 - (.1 + .3) / 2 and 1 - (0 + .6) / 2; task u: 0 - (.2 + .2) / 2. Tasks weigh the same."""
    asked = [
        *samples([[0.5], [1.0]] * 2, "a"), *samples([[0.1], [0.0]] * 2, "b"), *samples([[0.3], [0.6]] * 2, "c"),
        *samples([[0.0]] * 2, "a", "u"), *samples([[0.2]] * 2, "b", "u"), *samples([[0.2]] * 2, "c", "u"),
        *samples([[0.9], [0.9]] * 2, "unasked"),
    ]  # fmt: skip
    found = contrast_scores(asked, {"a": 1.0, "b": -0.5, "c": -0.5})
    assert found.mean == pytest.approx(((0.3 + 0.7) / 2 - 0.2) / 2)
    assert (found.wins, found.ties, found.losses) == (4, 0, 2)
    mean, weight = found.mean, 1 / 4  # of a context of u
    variance = 4 * 0.2**2 / 3 / 4 / 4 + weight**2 * ((1 + mean) ** 2 + (1 - mean) ** 2)
    reach = 2.44691 * variance**0.5
    assert found.low == pytest.approx((mean - reach) / 1.5, abs=1e-5)
    assert found.high == pytest.approx((mean + reach) / 1.5, abs=1e-5)
