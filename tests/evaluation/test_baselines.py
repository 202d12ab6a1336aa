"""Baselines hold exactly what the plan holds, at every prompt length."""

from __future__ import annotations

from typing import Any

import pytest

from kvsearch.evaluation.ready_methods import BASELINES, make_baselines, spread_evenly
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.policies import create_policy
from kvsearch.policies.random import RandomEviction
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from tests import tiny
from tests.combinations import in_turn
from tests.families import prompts
from tests.runtime.helpers import feed, running

LENGTHS = (1, 13, 40, 41, 200)
RAGGED: list[list[int] | None] = [[10, 7], [25, 6], [31, 12], [9, 40]]
PARTIAL: list[list[int] | None] = [None, [10, 7], None, [9, 40]]


def held(model: LoadedModel, program: Program, length: int) -> int:
    """Entries of all full-attention layers after a real prompt."""
    with running(model.model, NAME):
        cache = PlanCache(model.model, program)
        feed(model.model, cache, [prompts(1, length)])
    return sum(int(cache.planned[i].holder.entries().sum()) if i in cache.planned else 2 * length for i in range(4))


@in_turn(budgets=[RAGGED, PARTIAL], scaling=["proportional", "fixed", "fixed", "proportional"], length=LENGTHS)
def test_equal_entries_at_every_length(budgets: Any, scaling: str, length: int, model: LoadedModel) -> None:
    plan = tiny.plan_for(model, budgets, scaling=scaling)
    program = Program.from_plan(model.model, plan)
    wanted = held(model, program, length)
    for name, baseline in make_baselines(model.model, program).items():
        table = baseline.prefill.table(length)
        assert table.sum() == wanted, name
        assert table.max() - table.min() <= 1
        assert table.max() <= length
        assert held(model, baseline, length) == wanted, name


def plan_of(model: LoadedModel, *names: str) -> Program:
    """A plan whose layers have these policies in turn."""
    plan: dict[str, Any] = tiny.plan_for(model, RAGGED).model_dump()
    for index, layer in enumerate(plan["prefill"]["layers"]):
        layer["policy"] = {"name": names[index % len(names)], "params": {"sinks": 4}}
        layer["budget"] = [40, 38]  # room for SnapKV's window
    plan["total"] = 4 * 78
    return Program.from_plan(model.model, Plan.model_validate(plan))


def test_names_and_policies(model: LoadedModel) -> None:
    found = make_baselines(model.model, plan_of(model, "keydiff"))
    assert tuple(found) == tuple(BASELINES)
    policies = {name: set(program.policies) for name, program in found.items()}
    assert policies == {
        "uniform": {create_policy("keydiff", {"sinks": 4})},
        "snapkv": {create_policy("snapkv", {"sinks": 4})},
        "streaming": {create_policy("streaming")},
        "random": {RandomEviction()},
    }
    assert all(program.layers == (0, 1, 2, 3) for program in found.values())


@pytest.mark.parametrize(
    ("policies", "left_out"),
    [(["snapkv"], "snapkv"), (["streaming"], "streaming"), (["keydiff", "snapkv"], "uniform")],
)
def test_what_equals_another_baseline_or_has_no_counterpart_is_left_out(
    policies: list[str], left_out: str, model: LoadedModel
) -> None:
    found = list(make_baselines(model.model, plan_of(model, *policies)))
    assert found == [name for name in BASELINES if name != left_out]


def test_what_does_not_divide_goes_to_the_first_heads(model: LoadedModel) -> None:
    program = spread_evenly(model.model, create_policy("streaming"), {"prefill": lambda _: 8 * 3 + 5})
    table = program.prefill.table(20)
    assert table.tolist() == [[4, 4], [4, 4], [4, 3], [3, 3]]
