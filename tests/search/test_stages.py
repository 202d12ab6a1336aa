"""Which part of the budgets is varied, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsearch.errors import UsageError
from kvsearch.search.executors.base import Ints
from kvsearch.search.space import Basis, Group, Heads, Layers, Parity
from kvsearch.search.stages import Stage, groups_of, stages_of
from tests.search.searching import BUDGET, frame_of, settings_of, starts_of

FRAME = frame_of()
UNIFORM = starts_of(FRAME)["uniform"]
PROFILE: Ints = np.array([[8, 24], [12, 20], [30, 2 + 4], [18, 10]], dtype=np.int64)


def stages(starts: dict[str, Ints] | None = None, **changes: Any) -> list[Stage]:
    return list(stages_of(settings_of(**changes), FRAME, starts or {"uniform": UNIFORM}, lambda: UNIFORM))


@pytest.mark.parametrize(
    ("layers", "size", "expected"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (5, 2, [(0, 2), (2, 4), (4, 5)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
        (3, 3, [(0, 3)]),
        (36, 8, [(0, 8), (8, 16), (16, 24), (24, 32), (32, 36)]),
    ],
)
def test_groups_go_from_the_bottom_up_and_the_last_may_be_smaller(
    layers: int, size: int, expected: list[tuple[int, int]]
) -> None:
    assert [(rows.start, rows.stop) for rows in groups_of(layers, size)] == expected


@pytest.mark.parametrize(
    ("changes", "names", "kind", "dimensions"),
    [
        ({}, ["layers 0-1", "layers 2-3"], Group, [2, 2]),
        ({"group_size": 3}, ["layers 0-2", "layer 3"], Group, [3, 1]),
        ({"group_size": 4}, ["layers 0-3"], Layers, [4]),
        ({"parity": True}, ["layers 0-1", "layers 2-3"], Parity, [2, 2]),
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


def test_each_group_begins_where_the_one_before_ended() -> None:
    tables = [UNIFORM]
    for stage in stages_of(settings_of(), FRAME, {"uniform": UNIFORM}, lambda: tables[-1]):
        tables.append(stage.space.budgets(np.full(2, 1.25)))
        assert tables[-1].sum() == FRAME.total
    found = [table[:, 0].tolist() for table in tables[1:]]
    assert found == [[20, 20, 12, 12], [12, 12, 20, 20]]


def test_start_plans_make_the_spaces_of_heads() -> None:
    starts = {"uniform": UNIFORM, "calibrated": PROFILE}
    (heads,) = stages(starts, space="heads")
    assert isinstance(heads.space, Heads)
    np.testing.assert_equal(heads.space.budgets(heads.space.start), PROFILE)
    (basis,) = stages(starts, space="basis")
    assert isinstance(basis.space, Basis)
    np.testing.assert_equal(basis.space.budgets(basis.space.point_of(PROFILE)), PROFILE)
    assert [table.tolist() for table in basis.inject] == [table.tolist() for table in starts.values()]


@pytest.mark.parametrize("space", ["heads", "basis"])
def test_spaces_of_heads_need_a_start_plan(space: str) -> None:
    with pytest.raises(UsageError, match=rf"space {space} is made of start plans: give some with --start"):
        stages({"uniform": UNIFORM, "pyramid": starts_of(FRAME)["lower"]}, space=space)


def test_the_frame() -> None:
    assert (FRAME.layers, FRAME.heads, FRAME.total) == (4, 2, BUDGET * 8)
