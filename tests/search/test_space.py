"""Search spaces: worked examples, then what every space must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.search.spaces import (
    Group,
    Heads,
    Joint,
    Layers,
    Parity,
    Phases,
    Space,
    decode_choices,
    encode_choices,
    number_groups,
)
from tests.examples import at_most


def full(layers: int, heads: int, entries: int) -> Ints:
    return np.full((layers, heads), entries, dtype=np.int64)


def rows(*layers: int) -> Ints:
    return np.array(layers, dtype=np.int64)


@st.composite
def frames(draw: st.DrawFn) -> tuple[Ints, Ints, Ints]:
    """A table within its floors and caps, [L, Hkv] each, with entries above the floors."""
    shape = draw(st.tuples(st.integers(2, 7), st.integers(1, 3)))
    whole = st.lists(st.integers(0, 12), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    floors, above, room = (np.array(draw(whole)).reshape(shape) for _ in range(3))
    if draw(st.booleans()):  # as policies have them, equal for all heads
        floors, room = np.full(shape, floors[0, 0]), np.full(shape, 10_000)
    assume(above.any() and (floors + above).any())
    return floors, floors + above, floors + above + room


def layers_of(draw: st.DrawFn) -> tuple[Space, int]:
    floors, table, caps = draw(frames())
    low, high = np.broadcast_to(floors.max(axis=1)[:, None], table.shape), np.maximum(caps, 30).min(axis=1)[:, None]
    low, high = np.broadcast_to(low, table.shape), np.broadcast_to(high, table.shape)
    total = draw(st.integers(int(low.sum()), int(high.sum())))
    assume(total > 0)
    return Layers(total, low, high), total


def heads_of(draw: st.DrawFn) -> tuple[Space, int]:
    floors, table, caps = draw(frames())
    return Heads(table, floors, caps, size=draw(st.integers(1, len(table) - 1))), int(table.sum())


def group_of(draw: st.DrawFn) -> tuple[Space, int]:
    layers, heads = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    floor, cap = draw(st.integers(0, 8)), draw(st.integers(40, 90))
    entries = st.integers(max(floor, 1), 40)
    table = np.array(draw(st.lists(entries, min_size=layers * heads, max_size=layers * heads))).reshape(layers, heads)
    group = draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers - 1))
    return Group(table, rows(*sorted(group)), full(layers, heads, floor), full(layers, heads, cap)), int(table.sum())


def parity_of(draw: st.DrawFn) -> tuple[Space, None]:
    layers, heads, budget = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(9, 80))
    group = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    floors = full(layers, heads, draw(st.integers(1, 9)))
    return Parity(full(layers, heads, budget), rows(*sorted(group)), budget, floors), None


def joint_of(draw: st.DrawFn) -> tuple[Space, int]:
    """Two or three policies; the first table has them in turns, the second another one in each layer."""
    floors, table, caps = draw(frames())
    choices, layers = draw(st.integers(2, 3)), np.arange(len(table))
    low = np.concatenate([np.minimum(floors + 2 * choice, table) for choice in range(choices)])
    low[: len(table)] = floors
    assume(table.sum() > low.reshape(choices, *table.shape)[layers % choices, layers].sum())
    tables = [encode_choices(table, (layers + turn) % choices, choices) for turn in range(draw(st.integers(1, 2)))]
    high = np.tile(caps, (choices, 1))
    return Joint(tables, low, high, choices, draw(st.integers(1, len(table) - 1))), int(table.sum())


def phases_of(draw: st.DrawFn) -> tuple[Space, int]:
    """Two phases of three layers of two heads; the first one may be fixed."""
    fixed, varied = np.array([[10, 20], [30, 10], [8, 12]]), Layers(90, full(3, 2, 4), full(3, 2, 999))
    group = Group(full(3, 2, 15), rows(0, 1), full(3, 2, 4), full(3, 2, 999))
    return Phases([draw(st.sampled_from([fixed, varied])), group]), 180


SPACES: dict[str, Callable[[st.DrawFn], tuple[Space, Any]]] = {
    "joint": joint_of,
    "layers": layers_of,
    "heads": heads_of,
    "group": group_of,
    "parity": parity_of,
    "phases": phases_of,
}


@st.composite
def cases(draw: st.DrawFn, name: str) -> tuple[Space, Any, Any]:
    """A space, its total (None: it has none), and a point, often far outside the bounds or on them."""
    space, total = SPACES[name](draw)
    coordinate = st.one_of(st.floats(-1.0, 4.0), st.sampled_from([0.0, 0.5, 1.0, 1.0009765625, 100.0]))
    return space, total, np.array(draw(st.lists(coordinate, min_size=space.dimension, max_size=space.dimension)))


@pytest.mark.parametrize("name", SPACES)
@given(st.data())
def test_tables_are_whole_have_the_exact_total_and_points_that_stand_for_them(name: str, data: st.DataObject) -> None:
    space, total, point = data.draw(cases(name))
    before = point.copy()
    table, projected = space.make_table(point), space.project(point)
    assert point.tolist() == before.tolist()
    assert table.dtype == np.int64
    assert table.shape == space.shape
    assert table.min() >= 0
    assert total is None or table.sum() == total
    assert projected.dtype == np.float64
    assert (projected >= space.lower).all()
    assert (projected <= space.upper).all()
    assert space.project(projected).tolist() == projected.tolist()
    assert space.make_table(projected).tolist() == table.tolist()
    if name != "joint":
        found = space.find_point(table)
        assert (found >= space.lower).all()
        assert (found <= space.upper).all()
        assert space.make_table(found).tolist() == table.tolist()


@given(st.data())
@at_most(60)
def test_floors_and_caps_hold(data: st.DataObject) -> None:
    floors, table, caps = data.draw(frames())
    spaces: list[Space] = [Heads(table, floors, caps)]
    if floors[0].max() <= min(caps[0].min(), table[0].max()):
        group = Group(table, rows(0), floors, caps)
        spaces += [group] * (group._fewest <= group._fullest)
    for space in spaces:
        point = np.array(data.draw(st.lists(st.floats(-3, 9), min_size=space.dimension, max_size=space.dimension)))
        budgets = space.make_table(point)
        assert (budgets >= floors).all()
        assert (budgets <= caps).all()


FIRST = np.array([[10, 30], [20, 20], [25, 15]])
SECOND = np.array([[30, 10], [5, 15], [30, 30]])
FLOORS = np.concatenate([full(3, 2, 4), full(3, 2, 6)])


def joint_space(*chosen: list[int]) -> Joint:
    tables = [encode_choices(table, np.array(some), 2) for table, some in zip((FIRST, SECOND), chosen, strict=False)]
    return Joint(tables, FLOORS, full(6, 2, 90), 2)


def test_a_point_has_a_policy_and_a_multiplier_for_every_layer() -> None:
    space = joint_space([0, 1, 0])
    assert space.categories.tolist() == [2, 2, 2, 0, 0, 0]
    table = encode_choices(FIRST, np.array([0, 1, 0]), 2)
    assert space.find_point(table) == pytest.approx([0, 1, 0, 0, 0, 0])
    assert space.make_table(space.find_point(table)).tolist() == table.tolist()
    more = space.make_table(np.array([0, 1, 0, 1.0, 0, 0]))
    assert more.sum() == 120
    assert more[0].sum() > 40
    assert (decode_choices(more, 2) == [0, 1, 0]).all()


def test_a_layer_that_takes_another_policy_keeps_its_total_in_the_shares_of_a_plan_that_has_it() -> None:
    space = joint_space([0, 0, 0], [1, 1, 1])
    moved = space.make_table(np.array([1.0, 0, 0, 0, 0, 0]))
    assert moved[0].tolist() == [0, 0]
    assert moved[3].tolist() == [30, 10]  # 28 above the floors of 6, shared as 24 to 4
    assert moved[1:3].tolist() == FIRST[1:].tolist()
    assert joint_space([0, 0, 0]).make_table(np.array([1.0, 0, 0, 0, 0, 0]))[3].tolist() == [10, 30]  # as before


def test_a_layer_at_its_floor_can_gain_entries() -> None:
    table = np.array([[4, 4], [30, 42], [20, 20]])
    whole = encode_choices(table, np.zeros(3, dtype=np.int64), 2)
    space = Joint([whole], FLOORS, full(6, 2, 90), 2)
    assert space.find_point(whole) == pytest.approx([0, 0, 0, -3, 0, 0])
    assert space.make_table(space.find_point(whole)).tolist() == whole.tolist()
    more = space.make_table(np.array([0.0, 0, 0, 0, -1, -1]))
    assert more.sum() == 120
    assert more[0].tolist() == [15, 15]  # 0.5 e^3 = 10.0 beside 96 / e = 35.3 of 96 entries: 10.6 each


@given(st.data())
@at_most(60)
def test_floors_are_those_of_the_policy_of_a_layer(data: st.DataObject) -> None:
    space = joint_space([0, 1, 0], [1, 1, 1])
    point = np.array(data.draw(st.lists(st.floats(-4, 4), min_size=6, max_size=6)))
    table = space.make_table(point)
    chosen = decode_choices(table, 2)
    assert chosen.tolist() == space.project(point)[:3].tolist()
    rows = table.reshape(2, 3, 2)
    assert (rows[chosen, np.arange(3)] >= FLOORS.reshape(2, 3, 2)[chosen, np.arange(3)]).all()
    assert not rows[1 - chosen, np.arange(3)].any()
    assert table.sum() == 120


def test_nothing_to_choose() -> None:
    even, first = (encode_choices(table, np.zeros(3, int), 2) for table in (full(3, 2, 4), FIRST))
    with pytest.raises(UsageError, match="all at their floor"):
        Joint([even], FLOORS, full(6, 2, 90), 2)
    with pytest.raises(UsageError, match="a total of 120 is below the 126 entries that layers always keep"):
        Joint([first], FLOORS + np.repeat([0, 15], 3)[:, None], full(6, 2, 90), 2)
    with pytest.raises(UsageError, match="one group of 4 has all 4 layers"):
        number_groups(4, 4)


ENDLESS = full(4, 2, 999)  # caps


def test_layers_are_water_filled_onto_the_total() -> None:
    space = Layers(4 * 2 * 40, full(4, 2, 10), ENDLESS)
    assert space.dimension == 4
    assert space.lower.tolist() == [0.25] * 4
    assert space.upper.tolist() == [3.25] * 4  # 130 = 160 - 3 * 10
    assert space.make_table(np.ones(4)).tolist() == [[40, 40]] * 4
    assert space.make_table(np.array([0.4, 0.8, 1.2, 1.6])).tolist() == [[16, 16], [32, 32], [48, 48], [64, 64]]
    assert space.project(np.array([0.8, 1.6, 2.4, 3.2])).tolist() == pytest.approx([0.4, 0.8, 1.2, 1.6])  # a ray
    np.testing.assert_allclose(space.project(np.array([0.25, 3.25, 3.25, 3.25])), [0.25, 1.25, 1.25, 1.25])  # floor
    np.testing.assert_allclose(space.project(np.array([0.0, 0.0, 0.0, 9.0])) * 40, [10, 10, 10, 130])


def test_parity_changes_its_layers_only_and_has_no_total() -> None:
    table = np.array([[128, 128], [100, 100], [128, 128], [90, 90]])
    space = Parity(table, rows(1, 3), 128, full(4, 2, 33))
    assert space.dimension == 2
    assert (space.lower * 128).tolist() == [33, 33]
    assert space.upper.tolist() == [2.0, 2.0]
    assert (space.find_point(table) * 128).tolist() == [100, 90]
    budgets = space.make_table(np.array([1.5 + 0.5 / 128, 0.1]))  # halves up; not below the floor
    assert budgets.tolist() == [[128, 128], [193, 193], [128, 128], [33, 33]]
    assert space.make_table(np.array([9.0, 9.0]))[[1, 3], 0].tolist() == [256, 256]


def test_other_layers_make_room_for_a_group() -> None:
    table = np.array([[40, 40], [20, 60], [10, 70], [40, 40]])
    space = Group(table, rows(0), full(4, 2, 5), ENDLESS)
    assert space.find_point(table).tolist() == [1.0]
    assert space.make_table(space.find_point(table)).tolist() == table.tolist()
    assert space.make_table(np.array([1.6])).tolist() == [[64, 64], [16, 48], [8, 56], [32, 32]]  # 0.8 of what they had
    assert space.make_table(np.array([0.4])).tolist() == [[16, 16], [24, 72], [12, 84], [48, 48]]
    assert space.make_table(np.array([99.0])).tolist() == [[145, 145], [5, 5], [5, 5], [5, 5]]
    table = full(4, 2, 40)  # it stops where the others are at their bounds
    space = Group(table, rows(0, 2), full(4, 2, 5), full(4, 2, 60))
    np.testing.assert_allclose(space.upper * 40, 60)
    np.testing.assert_allclose(space.project(np.array([0.2, 0.2])) * 40, [20, 20])  # the others are full
    assert space.make_table(np.array([0.2, 0.2])).tolist() == [[20, 20], [60, 60]] * 2
    np.testing.assert_allclose(space.project(np.array([0.3, 0.2])) * 40, [24, 16])
    free = Group(table, rows(0, 2), full(4, 2, 5), ENDLESS)
    np.testing.assert_allclose(free.project(np.array([9.0, 9.0])) * 40, [75, 75])
    assert free.make_table(np.array([9.0, 0.0])).tolist() == [[145, 145], [5, 5], [5, 5], [5, 5]]


CALIBRATED = np.array([[10, 30], [50, 10], [20, 20], [90, 10]])


def test_multipliers_of_a_calibrated_table() -> None:
    space = Heads(CALIBRATED, full(4, 2, 10), ENDLESS, size=2)  # above the floors: 0, 20, 40, 0 and 10, 10, 80, 0
    assert space.dimension == 2
    assert space.make_table(space.find_point(CALIBRATED)).tolist() == CALIBRATED.tolist()
    assert space.make_table(np.array([1.5, 1.5])).tolist() == CALIBRATED.tolist()
    halved = space.make_table(np.array([0.5, 1.3]))  # 60 * 0.5 + 100 * 1.3 = 160
    assert halved.tolist() == [[10, 20], [30, 10], [23, 23], [114, 10]]
    np.testing.assert_allclose(space.project(np.array([0.25, 0.65])), [0.5, 1.3])
    np.testing.assert_allclose(space.upper, [160 / 60, 160 / 100])
    assert space.make_table(np.array([0.0, 0.0])).tolist() == CALIBRATED.tolist()
    assert space.make_table(np.array([0.0, 1.0])).tolist() == [[10, 10], [10, 10], [26, 26], [138, 10]]
