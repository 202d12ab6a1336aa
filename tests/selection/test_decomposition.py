"""A strategy taken apart: its policies with the budgets of another plan, and the other way round."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.plan import PHASES, Plan, PolicySpec, Profile, Size
from kvsearch.strategies.build import Chosen
from kvsearch.strategies.from_signals import cross_plans, floor_of, plan_of
from tests.signals.profiles import make_signals, signal_metadata

LAYERS, HEADS, LENGTH, MEAN = 4, 2, 60, 12
PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 4}, "streaming": {"sinks": 2}, "tova": {}}
SIZE = Size(budget=MEAN)
PROFILE = make_signals(signal_metadata(None, PATTERNS, budgets=(8, 16), length=LENGTH))


def plan(names: list[str], budgets: list[int], phases: str = "prefill", profile: Profile = PROFILE) -> Plan:
    """A plan of patterns and entries per head, by layer."""
    specs = tuple(PolicySpec(name=name, params=PATTERNS[name]) for name in names)
    table = np.repeat(np.array(budgets)[:, None], profile.metadata.shape[1], 1)
    return plan_of(profile, dict.fromkeys(PHASES[phases], Chosen(specs, table)), SIZE, {})


def kept(found: Plan, phase: Any = "prefill") -> list[int]:
    return [budget[0] for budget in found.budgets(phase) if budget is not None]


def patterns(found: Plan, phase: Any = "prefill") -> list[str]:
    return [layer.policy.name for layer in found.phase(phase).layers if layer is not None]


MIXED = plan(["tova", "streaming", "snapkv", "tova"], [1, 7, 30, 10])
CONTROL = plan(["snapkv"] * LAYERS, [MEAN] * LAYERS)


def test_the_two_plans_between_a_strategy_and_its_control() -> None:
    """SnapKV always keeps 4: layer 0 gets 3 more, of the 3 + 26 + 6 that the others have above theirs."""
    policies = cross_plans(PROFILE, SIZE, MIXED, CONTROL)
    budgets = cross_plans(PROFILE, SIZE, CONTROL, MIXED)
    assert (patterns(policies), kept(policies)) == (patterns(MIXED), [MEAN] * LAYERS)
    assert patterns(budgets) == ["snapkv"] * LAYERS
    share = 32 / 35  # what is left of what was above
    assert np.abs(np.array(kept(budgets)) - [4, 4 + 3 * share, 4 + 26 * share, 4 + 6 * share]).max() < 1
    for one in (policies, budgets):
        assert one.total == MIXED.total
        check_plan(one, "a part")


def test_parts_of_a_strategy_of_one_pattern() -> None:
    """Its policies are the control's, so one part is the control itself, and the other the strategy."""
    strategy = plan(["snapkv"] * LAYERS, [4, 8, 26, 10], "both")
    control = plan(["snapkv"] * LAYERS, [MEAN] * LAYERS, "both")
    policies = cross_plans(PROFILE, SIZE, strategy, control)
    budgets = cross_plans(PROFILE, SIZE, control, strategy)
    assert kept(policies) == kept(policies, "decode") == [MEAN] * LAYERS
    assert (budgets.prefill, budgets.decode) == (strategy.prefill, strategy.decode)


names = st.lists(st.sampled_from(list(PATTERNS)), min_size=LAYERS, max_size=LAYERS)


@given(names, st.lists(st.integers(1, 12), min_size=LAYERS - 1, max_size=LAYERS - 1))
def test_crossing_keeps_the_total_above_what_policies_keep(policies: list[str], budgets: list[int]) -> None:
    table = [*budgets, LAYERS * MEAN - sum(budgets)]
    other = plan(["tova"] * LAYERS, table)
    found = cross_plans(PROFILE, SIZE, plan(policies, [MEAN] * LAYERS), other)
    floors = [floor_of(PolicySpec(name=name, params=PATTERNS[name])) for name in policies]
    assert patterns(found) == policies
    assert found.total == other.total
    assert all(budget >= floor for budget, floor in zip(kept(found), floors, strict=True))
    if all(budget >= floor for budget, floor in zip(table, floors, strict=True)):
        assert found.budgets("prefill") == other.budgets("prefill")
