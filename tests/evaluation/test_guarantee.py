"""Bounds on the mean loss: worked by hand, never wrong more often than they say, and sharper than Hoeffding's."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.evaluation.guarantee import (
    compute_hoeffding_bentkus,
    count_needed_contexts,
    count_shown,
    find_allowed_loss,
    find_least_bound,
    find_shown_bound,
    make_guarantee,
    measure_context_losses,
    require_unseen,
    shows_bound,
)
from kvsearch.evaluation.names import FULL
from kvsearch.plan import Plan, canonical_json
from kvsearch.report.plans import describe_guarantee
from tests.combinations import in_turn
from tests.evaluation.test_statistics import samples
from tests.examples import at_most
from tests.plan.builders import make_plan

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.tasks.encode import TaskPrompts

REPEATS = 1000


def coins(lost: int, contexts: int) -> Floats:
    return (np.arange(contexts) < lost).astype(float)


@pytest.mark.parametrize(("contexts", "points"), [(30, 9.5), (120, 2.466), (149, 1.991), (299, 0.997)])
def test_without_a_loss_the_bound_is_exact(contexts: int, points: float) -> None:
    bound = find_least_bound(contexts, 0.95)
    assert 100 * bound == pytest.approx(points, abs=0.01)
    assert (1 - bound) ** contexts == pytest.approx(0.05)
    assert count_needed_contexts(bound, 0.95) == contexts
    none = np.zeros(contexts)
    assert shows_bound(none, bound, 0.95)
    assert not shows_bound(none, bound - 1e-4, 0.95)
    assert not shows_bound(none[1:], bound, 0.95)
    assert find_shown_bound(none, 0.95) == math.ceil(bound * 1000) / 1000


def test_the_stake_worked_by_hand() -> None:
    """Coins show what Hoeffding's bound does: 300 contexts allow six that lose all at a bound of five points."""
    allowed = find_allowed_loss(300, 0.05, 0.95)
    assert allowed is not None
    divergence = allowed * math.log(allowed / 0.05) + (1 - allowed) * math.log((1 - allowed) / 0.95)
    assert math.exp(-300 * divergence) == pytest.approx(0.05)
    assert [shows_bound(coins(lost, 300), 0.05, 0.95) for lost in (6, 7)] == [True, False]
    assert 6 <= 300 * allowed < 7
    # sixteen contexts that lose half do, too, which is more than six that lose all
    half = np.where(np.arange(300) < 16, 0.5, 0.0)
    assert shows_bound(half, 0.05, 0.95)
    assert half.mean() > allowed


def test_hoeffding_bentkus_worked_by_hand() -> None:
    assert compute_hoeffding_bentkus(0.0, 120, 0.025) == pytest.approx(0.975**120)
    tail = math.e * float(binom.cdf(7, 300, 0.05))
    kl = 7 / 300 * math.log(7 / 300 / 0.05) + 293 / 300 * math.log(293 / 300 / 0.95)
    assert compute_hoeffding_bentkus(7 / 300, 300, 0.05) == pytest.approx(min(tail, math.exp(-300 * kl)))
    assert compute_hoeffding_bentkus(0.05, 300, 0.05) == 1.0
    assert compute_hoeffding_bentkus(1.0, 10, 0.5) == 1.0


@at_most(20)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=80), st.floats(0.01, 0.9))
def test_whatever_hoeffding_shows_is_shown(values: list[float], bound: float) -> None:
    losses = np.array(values)
    allowed = find_allowed_loss(len(losses), bound, 0.95)
    if allowed is not None and losses.mean() <= allowed:
        assert shows_bound(losses, bound, 0.95)
    shown = find_shown_bound(losses, 0.95)
    assert shown >= min(losses.mean(), 1)
    assert all(shows_bound(losses, at, 0.95) for at in np.linspace(shown, 0.999, 7) if shown < 1)
    assert find_shown_bound(losses[::-1], 0.95) == shown  # no order of contexts counts


# losses with a mean of just the bound: coins, half coins, everywhere alike, rare and large among common and small
def draw(kind: str, mean: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    chances = rng.random(shape)
    if kind == "coins":
        return (chances < mean).astype(float)
    if kind == "halves":
        return np.where(chances < 2 * mean, 0.5, 0.0)
    if kind == "two tasks":  # the second loses nothing
        return (chances < np.where(np.arange(shape[1]) % 2, 0.0, 2 * mean)).astype(float)
    return np.where(chances < mean / 2, 1.0, mean / 2 / (1 - mean / 2))


@in_turn(kind=["coins", "halves", "two tasks", "mixed"], contexts=[30, 100, 300], mean=[0.02, 0.05, 0.1, 0.3])
def test_it_is_wrong_as_seldom_as_it_says(kind: str, contexts: int, mean: float) -> None:
    rng = np.random.default_rng(7)
    drawn = draw(kind, mean, (REPEATS, contexts), rng)
    wrong = np.mean([shows_bound(losses, mean, 0.95) for losses in drawn])
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / REPEATS)
    bentkus = np.mean([compute_hoeffding_bentkus(float(mine), contexts, mean) <= 0.05 for mine in drawn.mean(1)])
    assert bentkus <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / REPEATS)


def test_a_fixed_sequence_shares_no_level() -> None:
    """Of sizes from large to small that lose more and more, one that loses too much is passed in one of twenty."""
    rng = np.random.default_rng(3)
    means = (0.0, 0.005, 0.0201, 0.03, 0.06)
    wrong = 0
    for _ in range(REPEATS):
        same = rng.random(200)  # the same contexts at all sizes
        wrong += count_shown([(same < mean).astype(float) for mean in means], 0.02, 0.95) > 2
    assert wrong / REPEATS <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / REPEATS)
    none, all_lost = np.zeros(200), np.ones(200)
    assert count_shown([none, all_lost, none], 0.02, 0.95) == 1  # what comes after a failure is not looked at
    assert count_shown([], 0.02, 0.95) == 0


def test_the_loss_of_a_context_is_of_all_its_questions() -> None:
    """Gains within a context count, gains on others do not."""
    full = samples([[1.0, 0.0], [1.0, 1.0], [0.0], [1.0]], FULL)
    plan = samples([[0.0, 1.0], [0.5, 0.0], [1.0], [1.0]])
    names = {("t", str(key)): f"text {key}" for key in range(4)}
    losses = measure_context_losses([*full, *plan, *samples([[0.0]], "other")], "plan", names)
    np.testing.assert_allclose(losses, [0.0, 0.75, 0.0, 0.0])


def test_a_text_of_two_tasks_is_one_context() -> None:
    both = [*samples([[1.0]], FULL), *samples([[0.0]])]
    again = [replace(sample, task="u", score=1.0) for sample in both]
    shared = {("t", "0"): "text", ("u", "0"): "text"}
    np.testing.assert_allclose(measure_context_losses([*both, *again], "plan", shared), [0.5])
    keys = {("t", "0"): "0", ("u", "0"): "0"}  # worked examples: the keys say nothing of the questions
    np.testing.assert_allclose(measure_context_losses([*both, *again], "plan", keys), [1.0, 0.0])


def test_nothing_is_guaranteed_on_contexts_that_were_seen() -> None:
    seen = {
        "new": SimpleNamespace(warning=None),
        "old": SimpleNamespace(warning="it was chosen on 4 of the 6 contexts"),
    }
    evaluation = cast("Evaluation", SimpleNamespace(seen=seen))
    require_unseen(evaluation, ["new"])
    with pytest.raises(UsageError, match="old: nothing is guaranteed on contexts that it has seen: it was chosen on 4"):
        require_unseen(evaluation, ["new", "old"])


def test_a_changed_plan_has_no_guarantee() -> None:
    """What a file says is of the plan that it was written with, whoever has changed it since."""
    plan = make_plan()
    task = SimpleNamespace(task=SimpleNamespace(name="t"), distinct=40)
    shown = make_guarantee(plan, np.zeros(40), 0.08, 0.95, [cast("TaskPrompts", task)], "question-agnostic")
    stated = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"guarantee": shown})})
    assert stated.guarantee == shown
    assert Plan.model_validate_json(canonical_json(stated)).guarantee == shown
    assert describe_guarantee(stated).startswith("it loses at most 8 points to the full cache on the mean, with 95%")
    other = stated.model_copy(update={"floor": 0})
    assert other.guarantee is None
    assert describe_guarantee(other).endswith("is of another plan: this one was changed since")
    assert describe_guarantee(plan) == ""
    assert "guarantee" not in plan.model_dump(mode="json")["provenance"]
