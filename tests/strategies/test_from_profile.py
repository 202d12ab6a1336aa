"""From a profile to a plan: exact totals, bounds, and nothing but plain numbers in the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.calibration.cake_exponents import calibrate_cake
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.dynamic import calibrate_dynamic
from kvsearch.calibration.lukv import calibrate_lukv
from kvsearch.calibration.options import CakeOptions, LukvOptions
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import (
    Profile,
    ProfileMetadata,
    Size,
    canonical_json,
    load_plan,
    round_half_up,
    save_plan,
)
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import Program
from kvsearch.strategies.from_profile import plan_from_profile, round_ratios
from tests import tiny
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


@fixed()
@given(made=profiles, budget=st.integers(1, 250), length=st.one_of(st.none(), st.integers(1, 300)))
def test_a_budget_per_head(made: Profile, budget: int, length: int | None) -> None:
    at = length or LENGTH
    if max(made.metadata.floor, 1) <= budget < at:
        plan = plan_from_profile(made, Size(budget=budget, length=length))
        assert_fits(plan, made, budget * int(np.prod(made.metadata.shape)), at)
        assert plan.scaling == "fixed"
    else:
        with pytest.raises(UsageError, match=r"always kept|nothing would be evicted"):
            plan_from_profile(made, Size(budget=budget, length=length))


def test_the_worked_example() -> None:
    """ideals [19.5, 38.75, .25, 21.5] of 100 tokens, one entry at least."""
    ratios = np.array([[0.805, 0.6125], [0.9975, 0.785]])
    assert round_ratios(ratios, 100, 80, 1).tolist() == [[19, 39], [1, 21]]


def test_budgets_follow_the_local_ratios() -> None:
    made = profile(3, 3, seed=4)
    for percent in (20, 50, 83):
        plan = plan_from_profile(made, Size(ratio=percent / 100))
        ideal = (1 - made.local_ratios(percent / 100)) * LENGTH
        assert np.abs(budgets_of(plan) - ideal).max() <= 1.0


def test_a_budget_is_a_ratio_of_the_length() -> None:
    made = profile(3, 3, seed=4)
    by_budget = plan_from_profile(made, Size(budget=50))
    by_ratio = plan_from_profile(made, Size(ratio=0.75))
    assert by_budget.prefill == by_ratio.prefill
    assert (by_budget.scaling, by_ratio.scaling) == ("fixed", "proportional")


def test_layers_and_policy() -> None:
    made = profile()
    plan = plan_from_profile(made, Size(ratio=0.5))
    assert plan.planned_layers("prefill") == (0, 2)
    assert plan.model == made.metadata.model
    assert plan.decode is None
    assert [layer.policy for layer in plan.prefill.layers if layer is not None] == [made.metadata.policy] * 2


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (Size(ratio=0.98), "4 entries per kv head is below the 6 that are always kept"),
        (Size(budget=5), "5 entries per kv head is below the 6"),
        (Size(ratio=0.8, length=20), "4 entries per kv head is below the 6"),
        (Size(budget=200), "200 entries per kv head is all of a 200-token prompt: nothing would be evicted"),
        (Size(budget=512), "512 entries per kv head is all of a 200-token prompt"),
        (Size(budget=100, length=100), "all of a 100-token prompt"),
        (Size(ratio=0.0005), "200 entries per kv head is all"),
    ],
)
def test_sizes_out_of_reach(size: Size, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        plan_from_profile(profile(), size)


def test_the_least_and_the_most_there_is() -> None:
    assert budgets_of(plan_from_profile(profile(), Size(budget=FLOOR))).tolist() == [[FLOOR] * 2] * 2
    assert plan_from_profile(profile(), Size(budget=LENGTH - 1)).total == (LENGTH - 1) * 4


def test_a_profile_without_floor_still_keeps_an_entry() -> None:
    plan = plan_from_profile(profile(seed=1, floor=0), Size(ratio=0.99))
    assert plan.floor == 1
    assert budgets_of(plan).min() >= 1


def test_a_profile_of_another_method() -> None:
    metadata = ProfileMetadata.model_validate(metadata_dict(method="ppl"))
    with pytest.raises(UsageError, match="has no 'evicted_ratio' table: calibrate lukv, lava, cake, adakv"):
        plan_from_profile(Profile(metadata, {}), Size(ratio=0.5))


def test_where_a_plan_comes_from() -> None:
    made = profile()
    plan = plan_from_profile(made, Size(ratio=0.8, length=300))
    source = made.metadata.provenance
    assert (plan.provenance.method, plan.provenance.seed) == ("lukv", source.seed)
    assert plan.provenance.data_sha256 == source.data_sha256
    assert plan.provenance.settings == {"ratio": 0.8, "budget": None, **source.settings}
    assert canonical_json(plan) == canonical_json(plan_from_profile(profile(), Size(ratio=0.8, length=300)))


@pytest.mark.parametrize(
    ("plain", "numpy"),
    [
        (Size(ratio=0.75), Size(ratio=np.float64(0.75))),
        (Size(ratio=0.75), Size(ratio=np.float32(0.75))),
        (Size(budget=40, length=150), Size(budget=np.int64(40), length=np.int32(150))),
    ],
)
def test_numbers_of_numpy_do_not_leak(plain: Size, numpy: Size) -> None:
    plans = [plan_from_profile(profile(), size) for size in (plain, numpy)]
    assert canonical_json(plans[0]) == canonical_json(plans[1])
    for plan in plans:
        assert type(plan.total) is type(plan.length) is int
        assert all(type(entries) is int for budget in plan.budgets("prefill") if budget for entries in budget)
        assert all(type(plan.provenance.settings[key]) in (int, float, type(None)) for key in ("ratio", "budget"))


Calibration = Callable[[LoadedModel, CalibrationData, Policy], Profile]
CALIBRATIONS: dict[str, Calibration] = {
    "lukv": lambda model, data, policy: calibrate_lukv(model, data, policy, LukvOptions(normalization="layer")),
    "lava": lambda model, data, policy: calibrate_dynamic(model, data, policy, LAVaAllocation()),
    "cake": lambda model, data, policy: calibrate_cake(
        model, data, policy, CakeOptions(exponents="fit", fit_ratio=0.7)
    ),
    "adakv": lambda model, data, policy: calibrate_dynamic(model, data, policy, AdaKVAllocation()),
}


@pytest.mark.parametrize("method", CALIBRATIONS)
def test_from_a_model_to_a_plan_file_that_runs(method: str, tmp_path: Path) -> None:
    model = tiny.loaded("gemma3")
    policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
    made = CALIBRATIONS[method](model, tiny.calibration_data(80), policy)
    for size in (Size(ratio=0.7), Size(budget=20)):
        path = tmp_path / f"{size.budget}.json"
        save_plan(plan_from_profile(made, size), path)
        plan = load_plan(path)
        assert (plan.provenance.method, plan.allocation.name) == (method, "static")
        assert plan.planned_layers("prefill") == (1, 3)
        program = Program.from_plan(model.model, plan)
        assert program.prefill is not None
        assert program.prefill.table(made.metadata.length).sum() == plan.total
        assert set(program.policies) == {policy}
        assert "numpy" not in json.dumps(json.loads(path.read_text()))
