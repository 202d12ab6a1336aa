"""Which part of the budgets is varied, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.search.spaces import Group, Layers, Parity
from kvsearch.search.stages import BudgetBounds, SearchStage, make_stages
from tests.search.searching import BUDGET, frame_of, settings_of, starts_of

FRAME = frame_of()
UNIFORM = starts_of(FRAME)["uniform"]
PROFILE: Ints = np.array([[8, 24], [12, 20], [30, 2 + 4], [18, 10]], dtype=np.int64)


def stages(starts: dict[str, Ints] | None = None, **changes: Any) -> list[SearchStage]:
    return list(make_stages(settings_of(**changes), FRAME, starts or {"uniform": UNIFORM}, lambda: UNIFORM))


@pytest.mark.parametrize(
    ("changes", "names", "kind", "dimensions"),
    [
        ({}, ["layers 0-1", "layers 2-3"], Group, [2, 2]),
        ({"group_size": 3}, ["layers 0-2", "layer 3"], Group, [3, 1]),
        ({"parity": True, "group_size": 4}, ["layers 0-3"], Parity, [4]),
        ({"space": "layers"}, ["layers"], Layers, [4]),
    ],
)
def test_stages(changes: dict[str, Any], names: list[str], kind: type, dimensions: list[int]) -> None:
    found = stages(**changes)
    assert [stage.name for stage in found] == names
    assert [stage.number for stage in found] == list(range(1, len(names) + 1))
    assert {stage.count for stage in found} == {len(names)}
    assert [stage.space.dimension for stage in found] == dimensions
    assert all(type(stage.space) is kind for stage in found)


def test_start_plans_make_the_spaces_of_heads() -> None:
    starts = {"uniform": UNIFORM, "calibrated": PROFILE}
    (heads,) = stages(starts, space="heads")
    np.testing.assert_equal(heads.space.make_table(heads.space.find_point(PROFILE)), PROFILE)
    assert [table.tolist() for table in heads.inject] == [table.tolist() for table in starts.values()]


def test_spaces_of_heads_need_a_start_plan() -> None:
    with pytest.raises(UsageError, match="space heads is made of start plans: give some with --start"):
        stages({"uniform": UNIFORM, "pyramid": starts_of(FRAME)["lower"]}, space="heads")


BOTH = BudgetBounds(BUDGET, np.tile(FRAME.floors, (2, 1)), np.tile(FRAME.caps, (2, 1)), ("prefill", "decode"))
UNMEASURED = np.tile(UNIFORM, (2, 1))


def totals(table: Ints) -> list[int]:
    return [int(part.sum()) for part in np.split(table, 2)]


def test_groups_of_both_phases_one_after_the_other() -> None:
    found = list(make_stages(settings_of(), BOTH, {"uniform": UNMEASURED}, lambda: UNMEASURED))
    names = ["layers 0-1", "layers 2-3"]
    assert [stage.name for stage in found] == [f"{phase}, {name}" for phase in BOTH.phases for name in names]
    for stage in found:
        table = stage.space.make_table(np.linspace(1.5, 0.75, stage.space.dimension))
        varied = (table != UNMEASURED).any(axis=1)
        part = BOTH.parts[stage.rows.start >= 4]
        assert varied[part].any()
        assert not np.delete(varied, part).any()  # the other phase stays
        assert totals(table) == [BOTH.total] * 2


def test_each_phase_is_completed_to_its_own_total() -> None:
    table = np.concatenate([2 * UNIFORM, np.where(np.arange(4)[:, None] < 2, 2 * UNIFORM, UNIFORM)])
    completed = BOTH.complete(table)
    assert totals(completed) == [BOTH.total] * 2
    assert completed[:4].tolist() == UNIFORM.tolist()
    assert completed[4:, 0].tolist() == [21, 21, 11, 11]


def frame(budgets: Ints, average: int, floors: int = 0, caps: int | None = None) -> BudgetBounds:
    low = np.full_like(budgets, floors)
    return BudgetBounds(average, low, np.full_like(low, average * budgets.size if caps is None else caps))


@pytest.mark.parametrize(
    ("budgets", "literal", "exact"),
    [
        ([101, 50, 30, 20], [121, 60, 36, 24], [120, 60, 36, 24]),
        ([1, 1, 1, 4], [35, 35, 35, 138], [35, 34, 34, 137]),  # 240 / 7 = 34.29, 960 / 7 = 137.14
    ],
)
def test_worked_examples_for_an_average_of_60(budgets: list[int], literal: list[int], exact: list[int]) -> None:
    given: Ints = np.array(budgets)[:, None]
    assert np.ceil(given * 240 / given.sum()).ravel().tolist() == literal  # as the paper has it
    completed = frame(given, 60).complete(given)
    assert completed.sum() == 240
    assert np.abs(completed - given * 240 / given.sum()).max() < 1
    assert completed.ravel().tolist() == exact


def test_bounds_bind_without_losing_entries() -> None:
    table: Ints = np.array([[101], [50], [30], [20]])
    assert frame(table, 60, floors=30).complete(table).ravel().tolist() == [117, 58, 35, 30]  # 210 in 101 : 50 : 30
    assert frame(table, 60, caps=100).complete(table).ravel().tolist() == [100, 70, 42, 28]  # 140 in 5 : 3 : 2
    with pytest.raises(UsageError, match="total 40 cannot be met"):
        frame(table, 10, floors=30).complete(table)
