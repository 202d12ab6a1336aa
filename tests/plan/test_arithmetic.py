"""Budgets at another prompt length and plans at another size sum exactly; plans are compared head by head."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.plan import Phase, Plan, load_plan, save_plan
from kvsearch.plan.arithmetic import (
    BudgetChange,
    SettingChange,
    add_carry,
    compare_plans,
    compute_budgets,
    even_out_budgets,
    scale,
)
from kvsearch.plan.size import LAID_OUT
from tests.plan.builders import PROVENANCE, make_plan, model_dict, phase_dict

LAVA = {"name": "lava", "params": {"layers": "planned"}}


@st.composite
def proportional_plans(draw: st.DrawFn) -> Plan:
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length, floor = draw(st.integers(8, 5000)), draw(st.integers(0, 8))
    budget = st.lists(st.integers(max(floor, 1), length), min_size=heads, max_size=heads)
    rows = draw(st.lists(budget, min_size=layers, max_size=layers))
    return make_plan([*rows, None], length=length, floor=floor)


def half_up(value: Fraction) -> int:
    return int((value + Fraction(1, 2)) // 1)


@given(proportional_plans(), st.integers(1, 12_000))
def test_proportional_totals_are_exact_at_every_length(plan: Plan, length: int) -> None:
    budgets = compute_budgets(plan, "prefill", length)
    low = min(max(plan.floor, 1), length)
    wanted = half_up(Fraction(plan.total * length, plan.length))
    assert budgets.dtype == np.int64
    assert budgets.shape == (len(plan.planned_layers("prefill")), plan.model.kv_heads)
    assert budgets.min() >= low
    assert budgets.max() <= length
    assert budgets.sum() == min(max(wanted, low * budgets.size), length * budgets.size)


def test_fixed_prefill_budgets_are_clipped_at_the_prompt() -> None:
    """A sequence outgrows its prompt: three tokens are no reason to hold three entries for ever."""
    plan = make_plan(scaling="fixed", length=None, decode=phase_dict([None, [9, 3], None]), floor=3)
    assert compute_budgets(plan, "prefill", 10).tolist() == [[10, 6], [4, 10]]
    assert compute_budgets(plan, "prefill", 9999).tolist() == [[10, 6], [4, 12]]
    assert compute_budgets(plan, "decode", 5).tolist() == [[9, 3]]
    budgets: list[list[int] | None] = [[10, 6], None, [4, 12]]
    proportional = make_plan(budgets, decode=phase_dict(budgets))
    assert compute_budgets(proportional, "prefill", 2).tolist() == [[2, 2], [2, 2]]
    assert compute_budgets(proportional, "decode", 2).tolist() == [[4, 4], [4, 4]]


def rows(plan: Plan, phase: Phase = "prefill") -> list[list[int]]:
    return [list(budget) for budget in plan.budgets(phase) if budget is not None]


def fixed(budgets: list[list[int] | None] | None = None, **changes: Any) -> Plan:
    return make_plan(budgets, **{"scaling": "fixed", "length": None, **changes})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({"budget": 16}, [[20, 12], [8, 24]]),
        ({"total": 20}, [[5, 4], [4, 7]]),  # the floor of 4 takes 8, 12 / 22 * 10 = 5.45, 12 / 22 * 12 = 6.55
        ({"total": 100}, [[31, 19], [13, 37]]),  # 31.25, 18.75, 12.5, 37.5
        ({"total": 140}, [[40, 36], [24, 40]]),  # 43.75 and 52.5 end at the length of 40, 60 / 10 * 6 = 36
        ({"total": 160}, [[40, 40], [40, 40]]),
        ({"budget": 100, "length": 1000}, [[125, 75], [50, 150]]),
    ],
)
def test_entries_scale_a_plan_by_one_factor(size: dict[str, int], expected: list[list[int]]) -> None:
    plan = make_plan(allocation=LAVA)
    scaled = scale(plan, **size)
    assert rows(scaled) == expected
    assert (scaled.allocation, scaled.model) == (plan.allocation, plan.model)
    assert scaled.phase("prefill").policies == plan.phase("prefill").policies
    assert (scaled.scaling, scaled.length, scaled.floor) == ("fixed", size.get("length", 40), 4)
    assert scaled.budgets("prefill")[1] is None
    assert scaled.total == sum(map(sum, expected))


@pytest.mark.parametrize("source", [make_plan(), fixed(length=40)])
@pytest.mark.parametrize(
    ("ratio", "length", "expected"),
    [
        (0.8, None, [[10, 6], [4, 12]]),
        (0.9, 400, [[50, 30], [20, 60]]),
        (0.2, None, [[40, 29], [19, 40]]),  # 128 entries; 12 and 10 end at 40, 48 / 10 * 6 = 28.8
    ],
)
def test_a_ratio_gives_a_plan_that_scales_with_the_prompt(
    source: Plan, ratio: float, length: int | None, expected: list[list[int]]
) -> None:
    scaled = scale(source, ratio=ratio, length=length)
    assert rows(scaled) == expected
    assert (scaled.scaling, scaled.length) == ("proportional", length or 40)
    of_any_prompt = scale(fixed(), ratio=0.1234)
    assert (of_any_prompt.length, of_any_prompt.total) == (LAID_OUT, of_any_prompt.heads * 8766)


def test_fixed_budgets_above_the_length_stay_where_they_are() -> None:
    plan = fixed([[60, 20]], length=40)
    assert rows(scale(plan, total=80)) == [[60, 20]]
    assert rows(scale(plan, total=95)) == [[60, 35]]
    assert rows(scale(plan, total=40)) == [[30, 10]]
    with pytest.raises(UsageError, match="total of 101 is above the 100 entries"):
        scale(plan, total=101)


def test_even_budgets_keep_policies_and_totals() -> None:
    plan = add_carry(make_plan([[40, 5], None, [4, 13]]), "match")
    even = even_out_budgets(plan)
    assert even.phase("prefill").table.tolist() == [[16, 16], [15, 15]]
    assert (even.total, even.phase("prefill").policies) == (plan.total, plan.phase("prefill").policies)
    assert (carries(even), even.allocation.name) == (("none",) * 3, "static")
    assert even_out_budgets(even).phase("prefill") == even.phase("prefill")


def carries(plan: Plan) -> tuple[str, ...]:
    return plan.phase("prefill").carries


def test_entries_carry_where_something_leaves() -> None:
    """Layers that keep prompts whole are left out, also once a plan is scaled; without carry it is not in the file."""
    full = {"name": "full", "params": {}}
    whole = phase_dict([[40, 40], None, [4, 12], [40, 40]])
    whole["layers"][3]["policy"] = full
    plan = make_plan([[40, 40], None, [4, 12], [40, 40]], prefill=whole)
    matched = add_carry(plan, "match")
    assert carries(matched) == ("none", "none", "match", "none")
    assert canonical_json(matched).count(b'"carry": "match"') == 1
    assert b"carry" not in canonical_json(plan)
    assert compare_plans(plan, matched) == ([SettingChange("carry", None, "match", "prefill", (2,))], [])
    assert compare_plans(add_carry(matched, "none"), plan) == ([], [])
    assert carries(scale(matched, total=140)) == ("none", "none", "match", "none")
    assert carries(scale(matched, total=240)) == ("none",) * 4
    for unfit, words in (
        (make_plan([[40, 40]]), "keeps prompts whole"),
        (fixed(prefill=None, decode=phase_dict([[4, 4], None, [4, 4]]), total=16), "no 'prefill' phase"),
    ):
        with pytest.raises(UsageError, match=words):
            add_carry(unfit, "match")
    with pytest.raises(UsageError, match="matc"):
        add_carry(plan, "matc")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ({"total": 40, "budget": 10}, "give either a ratio to evict"),
        (
            {"total": 15},
            r"total of 15 is below the 16 entries that 4 kv heads always keep, 4 each \(the plan's floor\)",
        ),
        ({"total": 161}, "total of 161 is above the 160 entries that prompts of this length have for 4 kv heads: keep"),
        ({"budget": 4, "length": 3}, "total of 16 is above the 12 entries"),
    ],
)
def test_impossible_sizes_are_usage_errors(size: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        scale(make_plan(), **size)
    with pytest.raises(UsageError, match="a decode total of 6 is below the 8 entries that 2 kv heads always keep"):
        scale(make_plan(decode=phase_dict([None, [5, 4], None])), total=20)


def test_provenance_names_the_files_a_plan_was_made_of(tmp_path: Path) -> None:
    def saved(plan: Plan, name: str) -> str:
        save_plan(plan, tmp_path / name)
        return hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()

    plan = make_plan()
    hashed = saved(plan, "plan.json")
    smaller = scale(plan, ratio=0.5, length=60)
    scaled = saved(smaller, "smaller.json")
    entries = scale(load_plan(tmp_path / "smaller.json"), budget=4)
    changes = (
        f"scaled to ratio 0.5, length 60: plan {hashed}",
        f"scaled to budget 4, length 60: plan {scaled}",
    )
    assert entries.provenance.settings == {**PROVENANCE["settings"], "ratios": (0.5, 0.25), "changes": changes}
    assert {**entries.provenance.model_dump(), "settings": {}} == {**PROVENANCE, "settings": {}}
    assert scale(fixed(), total=40).provenance.settings["changes"] == (
        f"scaled to total 40: plan {saved(fixed(), 'fixed.json')}",
    )


@given(proportional_plans(), st.integers(1, 20_000), st.none() | st.integers(1, 4000))
def test_scaled_totals_are_exact_or_refused(plan: Plan, total: int, length: int | None) -> None:
    low = max(plan.floor, 1)
    if not low * plan.heads <= total <= plan.heads * (length or plan.length):
        with pytest.raises(UsageError, match=r"is below|is above"):
            scale(plan, total=total, length=length)
        return
    scaled = scale(plan, total=total, length=length)
    assert scaled.total == np.sum(rows(scaled)) == total
    assert np.min(rows(scaled)) >= low
    check_shape(np.array(rows(plan)), np.array(rows(scaled)))


def check_shape(before: np.ndarray, after: np.ndarray) -> None:
    """A head with more than another still has no less, and equal ones differ by one entry at most."""
    order = np.argsort(before.ravel(), kind="stable")
    assert np.diff(after.ravel()[order]).min(initial=0) >= -1


@given(proportional_plans(), st.integers(8, 12_000))
def test_scaling_to_what_a_prompt_gets_gives_its_budgets(plan: Plan, length: int) -> None:
    wanted = compute_budgets(plan, "prefill", length)
    scaled = scale(plan, total=int(wanted.sum()), length=length)
    assert np.array_equal(rows(scaled), wanted)


def with_policies(*policies: tuple[str, dict[str, Any]] | None) -> dict[str, Any]:
    phase = phase_dict([None if policy is None else [4, 4] for policy in policies])
    for layer, policy in zip(phase["layers"], policies, strict=True):
        if policy is not None:
            layer["policy"] = {"name": policy[0], "params": policy[1]}
    return phase


def test_budgets_are_compared_head_by_head() -> None:
    before = make_plan([[10, 6], None, [4, 12]])
    after = make_plan([[10, 7], [5, 5], [4, 12]], decode=phase_dict([None, None, [8, 8]]))
    assert compare_plans(before, after)[1] == [
        BudgetChange("prefill", 0, 1, 6, 7),
        BudgetChange("prefill", 1, 0, None, 5),
        BudgetChange("prefill", 1, 1, None, 5),
        BudgetChange("decode", 2, 0, None, 8),
        BudgetChange("decode", 2, 1, None, 8),
    ]
    with pytest.raises(IncompatibleError, match="other layers or heads"):
        compare_plans(before, make_plan([[4, 4]]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"length": 50}, [("length", 40, 50)]),
        ({"floor": 2}, [("floor", 4, 2)]),
        ({"scaling": "fixed", "length": None}, [("scaling", "proportional", "fixed"), ("length", 40, None)]),
        (
            {"allocation": {"name": "lava", "params": {"layers": "planned"}}},
            [("allocation", "static", "lava"), ("allocation.layers", None, "planned")],
        ),
        (
            {"model": model_dict(weights_sha256="0" * 64)},
            [("model.weights_sha256", model_dict()["weights_sha256"], "0" * 64)],
        ),
    ],
)
def test_settings_of_the_whole_plan(changes: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    changes = {"provenance": {**PROVENANCE, "seed": 8}, **changes}  # which does not matter
    found = compare_plans(make_plan(), make_plan(**changes))
    assert found == ([SettingChange(*change) for change in expected], [])


def test_policies_and_parameters_are_grouped_by_layers() -> None:
    snapkv, wider, h2o = ("snapkv", {"window": 4}), ("snapkv", {"window": 8}), ("h2o", {"sinks": 1})
    before = make_plan([[4, 4]] * 4, prefill=with_policies(snapkv, snapkv, snapkv, snapkv))
    after = make_plan([[4, 4]] * 4, prefill=with_policies(wider, h2o, snapkv, wider))
    assert compare_plans(before, after)[0] == [
        SettingChange("policy.window", 4, 8, "prefill", (0, 3)),
        SettingChange("policy", "snapkv", "h2o", "prefill", (1,)),
        SettingChange("policy.window", 4, None, "prefill", (1,)),
        SettingChange("policy.sinks", None, 1, "prefill", (1,)),
    ]


def test_a_plan_of_the_decode_phase_alone_is_scaled() -> None:
    plan = fixed(prefill=None, decode=phase_dict([[10, 6], None, [4, 12]]))
    assert rows(scale(plan, budget=10_000, length=40), "decode") == [[12_500, 7_500], [5_000, 15_000]]
    proportional = scale(plan, ratio=0.5, length=40)  # 80 entries
    assert (rows(proportional, "decode"), proportional.total) == ([[25, 15], [10, 30]], 80)
