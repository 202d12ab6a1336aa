"""Plans without calibration: even budgets and pyramids, totals exact, and what is refused before a model is loaded."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.evaluation.methods import make_direct_plan
from kvsearch.plan import PHASES, Size
from kvsearch.plan.arithmetic import compute_budgets
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from tests import tiny

EVEN = Uniform()


@pytest.mark.parametrize("phases", PHASES)
def test_a_fixed_budget_in_each_combination_of_phases(phases: str) -> None:
    """Layers that are not planned keep everything."""
    model = tiny.loaded("gemma3")
    plan = make_direct_plan(model, create_policy("h2o", {"recent": 3}), Size(budget=20), PHASES[phases], EVEN)
    assert (plan.prefill is not None, plan.decode is not None) == (phases != "decode", phases != "prefill")
    for phase in PHASES[phases]:
        assert plan.budgets(phase) == (None, (20, 20), None, (20, 20))
        assert plan.phase(phase).layers[1].policy.params == {"recent_share": 0.5, "recent": 3, "sinks": 0}  # type: ignore[union-attr]
    assert (plan.total, plan.scaling, plan.floor) == (80, "fixed", 3)
    assert Program.from_plan(model.model, plan).layers == (1, 3)


def test_a_ratio_scales_with_the_prompt_and_its_total_is_exact() -> None:
    size = Size(ratio=0.7, length=101)
    plan = make_direct_plan(tiny.loaded(), create_policy("streaming"), size, PHASES["prefill"], EVEN)
    assert plan.total == 242  # 0.3 * 101 * 8 = 242.4
    assert {entries for budget in plan.budgets("prefill") if budget for entries in budget} == {30, 31}
    assert compute_budgets(plan, "prefill", 1010).sum() == 2420


def test_a_pyramid_of_a_ratio_stays_within_the_prompt() -> None:
    """Above a window of 4 the first layer has room for 12: the line is 12, 9.3, 6.7, 4."""
    policy, size = create_policy("snapkv", {"window": 4}), Size(ratio=0.25, length=16)
    plan = make_direct_plan(tiny.loaded(), policy, size, PHASES["prefill"], Pyramid(4, policy.least))
    budgets = np.array(plan.budgets("prefill"))
    assert budgets.sum() == 12 * 8
    assert np.abs(budgets[:, 0] - [16, 40 / 3, 32 / 3, 8]).max() < 1
