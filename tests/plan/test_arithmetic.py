"""Budgets at another prompt length sum exactly, and plans are compared head by head."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.plan import BudgetChange, Plan, budgets_at, diff
from kvsearch.plan.rounding import largest_remainder

from .builders import make_plan, model_dict, phase_dict


@st.composite
def proportional_plans(draw: st.DrawFn) -> Plan:
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length, floor = draw(st.integers(8, 5000)), draw(st.integers(0, 8))
    budget = st.lists(st.integers(max(floor, 1), length), min_size=heads, max_size=heads)
    rows = draw(st.lists(budget, min_size=layers, max_size=layers))
    return make_plan([*rows, None], length=length, floor=floor)


def half_up(value: Fraction) -> int:
    return int((value + Fraction(1, 2)) // 1)


@settings(max_examples=150, deadline=None)
@given(proportional_plans(), st.integers(1, 12_000))
def test_proportional_totals_are_exact_at_every_length(plan: Plan, length: int) -> None:
    assert plan.length is not None
    budgets = budgets_at(plan, "prefill", length)
    low = min(max(plan.floor, 1), length)
    wanted = half_up(Fraction(plan.total * length, plan.length))
    assert budgets.dtype == np.int64
    assert budgets.shape == (len(plan.planned_layers("prefill")), plan.model.kv_heads)
    assert budgets.min() >= low
    assert budgets.max() <= length
    assert budgets.sum() == min(max(wanted, low * budgets.size), length * budgets.size)


@settings(max_examples=50, deadline=None)
@given(proportional_plans())
def test_the_calibration_length_gives_the_plan_itself(plan: Plan) -> None:
    assert plan.length is not None
    rows = [row for row in plan.budgets("prefill") if row is not None]
    assert np.array_equal(budgets_at(plan, "prefill", plan.length), rows)


@settings(max_examples=50, deadline=None)
@given(proportional_plans(), st.integers(2, 5))
def test_whole_multiples_scale_without_rounding(plan: Plan, times: int) -> None:
    assert plan.length is not None
    rows = np.array([row for row in plan.budgets("prefill") if row is not None])
    assert np.array_equal(budgets_at(plan, "prefill", times * plan.length), times * rows)


def test_scaling_rounds_by_largest_remainder_over_all_layers() -> None:
    plan = make_plan([[13, 7], [9, 5]], length=40, floor=1)
    ideal = np.array([[13, 7], [9, 5]]) * 27 / 40
    expected = largest_remainder(ideal, 23)  # 34 * 27 / 40 = 22.95
    assert np.array_equal(budgets_at(plan, "prefill", 27), expected)


def test_a_floor_that_binds_takes_from_the_others() -> None:
    plan = make_plan([[4, 36]], length=40, floor=4, model=model_dict(layers=1))
    assert budgets_at(plan, "prefill", 20).tolist() == [[4, 16]]


def test_short_prompts_get_what_is_possible() -> None:
    plan = make_plan([[4, 6]], length=40, floor=4, model=model_dict(layers=1))
    assert budgets_at(plan, "prefill", 8).tolist() == [[4, 4]]
    assert budgets_at(plan, "prefill", 1).tolist() == [[1, 1]]


def test_fixed_prefill_budgets_are_clipped_at_the_prompt() -> None:
    plan = make_plan(scaling="fixed", length=None, decode=phase_dict([None, [9, 3], None]), floor=3)
    assert budgets_at(plan, "prefill", 10).tolist() == [[10, 6], [4, 10]]
    assert budgets_at(plan, "prefill", 9999).tolist() == [[10, 6], [4, 12]]
    assert budgets_at(plan, "decode", 5).tolist() == [[9, 3]]  # the sequence goes on


def test_bad_requests_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="at least one token, got a length of 0"):
        budgets_at(make_plan(), "prefill", 0)
    with pytest.raises(UsageError, match="no 'decode' phase"):
        budgets_at(make_plan(), "decode", 5)


def test_diff_lists_what_changed() -> None:
    before = make_plan([[10, 6], None, [4, 12]])
    after = make_plan([[10, 7], [5, 5], [4, 12]], decode=phase_dict([None, None, [8, 8]]))
    assert diff(before, before) == []
    assert diff(before, after) == [
        BudgetChange("prefill", 0, 1, 6, 7),
        ("prefill", 1, 0, None, 5),
        ("prefill", 1, 1, None, 5),
        ("decode", 2, 0, None, 8),
        ("decode", 2, 1, None, 8),
    ]
    assert [change[3:] for change in diff(after, before)] == [(7, 6), (5, None), (5, None), (8, None), (8, None)]


def test_diff_refuses_another_shape() -> None:
    with pytest.raises(IncompatibleError, match="other layers or heads"):
        diff(make_plan(), make_plan([[4, 4]]))
