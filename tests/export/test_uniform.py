from __future__ import annotations

import pytest

from kvsearch.errors import UsageError
from kvsearch.export.build import Target
from kvsearch.export.uniform import PHASES, check_request, uniform_plan
from kvsearch.plan import budgets_at
from kvsearch.policies import create_policy
from kvsearch.runtime import Program

from .. import tiny


@pytest.mark.parametrize("phases", PHASES)
def test_a_fixed_budget_in_each_combination_of_phases(phases: str) -> None:
    model = tiny.loaded("gemma3")
    plan = uniform_plan(model, create_policy("h2o", {"recent": 3}), Target(budget=20), PHASES[phases])
    assert (plan.prefill is not None, plan.decode is not None) == (phases != "decode", phases != "prefill")
    for phase in PHASES[phases]:
        assert plan.budgets(phase) == (None, (20, 20), None, (20, 20))
        assert plan.phase(phase).layers[1].policy.params == {"recent_share": 0.5, "recent": 3, "sinks": 0}  # type: ignore[union-attr]
    assert (plan.total, plan.scaling, plan.floor) == (80, "fixed", 3)
    assert Program.from_plan(model.model, plan).layers == (1, 3)


def test_a_ratio_scales_with_the_prompt_and_its_total_is_exact() -> None:
    plan = uniform_plan(tiny.loaded(), create_policy("streaming"), Target(ratio=0.7, length=101), PHASES["prefill"])
    assert plan.total == 242  # 0.3 * 101 * 8 = 242.4
    assert plan.prefill is not None
    assert {entries for budget in plan.budgets("prefill") if budget for entries in budget} == {30, 31}
    assert budgets_at(plan, "prefill", 1010).sum() == 2420


@pytest.mark.parametrize(
    ("name", "target", "problem"),
    [
        ("snapkv", Target(budget=31), "31 entries per kv head is below the 32 that snapkv always keeps"),
        ("snapkv", Target(ratio=0.9, length=100), "10 entries per kv head is below the 32"),
        ("h2o", Target(ratio=0.9), "a ratio needs the --length"),
        ("h2o", Target(budget=200, length=200), "all of a 200-token prompt"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(name: str, target: Target, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_request(create_policy(name), target)
