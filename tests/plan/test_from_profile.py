"""From a profile to a plan: exact totals, bounds, and nothing but plain numbers in the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.plan import Profile, ProfileMetadata, Size
from kvsearch.plan.build import plan_from_profile
from kvsearch.plan.size import round_half_up
from tests.examples import fixed
from tests.plan.builders import metadata_dict, model_dict

LENGTH, FLOOR = 200, 6


def profile(layers: int = 2, heads: int = 2, seed: int = 0, length: int = LENGTH, floor: int = FLOOR) -> Profile:
    """A profile with local ratios spread at random around the global ones; every second layer of the model is in it."""
    most = 1 - floor / length
    means = np.minimum(np.arange(1, 100) / 100, most)[:, None, None]
    spread = np.random.default_rng(seed).uniform(-1, 1, (layers, heads))
    spread -= spread.mean()
    spread /= max(1.0, np.abs(spread).max())
    table = np.clip(means + np.minimum(means, most - means) * spread, 0, 1).astype(np.float32)
    metadata = metadata_dict(
        model=model_dict(layers=2 * layers, kv_heads=heads),
        layers=list(range(0, 2 * layers, 2)),
        length=length,
        floor=floor,
    )
    return Profile(ProfileMetadata.model_validate(metadata), {"evicted_ratio": table})


profiles = st.builds(
    profile, layers=st.integers(1, 4), heads=st.integers(1, 4), seed=st.integers(0, 999), floor=st.integers(0, 40)
)


def budgets_of(plan: Any) -> np.ndarray:
    return np.array([budget for budget in plan.budgets("prefill") if budget is not None])


def assert_fits(plan: Any, made: Profile, total: int, length: int) -> None:
    budgets = budgets_of(plan)
    assert plan.total == total == budgets.sum()
    assert budgets.shape == made.metadata.shape
    assert budgets.min() >= max(made.metadata.floor, 1)
    assert budgets.max() <= length
    assert (plan.length, plan.floor) == (length, max(made.metadata.floor, 1))


@fixed()
@given(made=profiles, percent=st.floats(0.5, 99.5), length=st.one_of(st.none(), st.integers(1, 5000)))
def test_a_ratio_of_any_prompt(made: Profile, percent: float, length: int | None) -> None:
    """Either the total is exact and every head in its bounds, or the size is refused for being out of reach."""
    at = length or LENGTH
    heads = int(np.prod(made.metadata.shape))
    total = round_half_up((1 - percent / 100) * at * heads)
    size = Size(ratio=percent / 100, length=length)
    if max(made.metadata.floor, 1) * heads <= total < at * heads:
        plan = plan_from_profile(made, size)
        assert_fits(plan, made, total, at)
        assert plan.scaling == "proportional"
    else:
        with pytest.raises(UsageError, match=r"always kept|nothing would be evicted"):
            plan_from_profile(made, size)


def test_a_budget_is_a_ratio_of_the_length() -> None:
    made = profile(3, 3, seed=4)
    by_budget = plan_from_profile(made, Size(budget=50))
    by_ratio = plan_from_profile(made, Size(ratio=0.75))
    assert by_budget.prefill == by_ratio.prefill
    assert (by_budget.scaling, by_ratio.scaling) == ("fixed", "proportional")


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (Size(ratio=0.98), "4 entries per kv head is below the 6 that are always kept"),
        (Size(budget=200), "200 entries per kv head is all of a 200-token prompt: nothing would be evicted"),
    ],
)
def test_sizes_out_of_reach(size: Size, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        plan_from_profile(profile(), size)
