"""How much haystack fits, where needles go, and where randomness comes from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.ruler.draft import FULL, Stream, insert, largest


@pytest.mark.parametrize(
    ("room", "least", "most", "expected"),
    [
        (10, 0, None, 3),  # 3 + 2 * 3 = 9 tokens
        (11, 0, None, 4),
        (3, 0, None, 0),
        (2, 0, None, 0),  # the least does not fit: the caller has to look
        (-5, 7, None, 7),
        (40, 1, 5, 5),
        (40, 5, 5, 5),
    ],
)
def test_the_largest_number_of_units(room: int, least: int, most: int | None, expected: int) -> None:
    assert largest(lambda units: 3 + 2 * units, room, least, most) == expected


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=300),
    base=st.integers(0, 50),
    room=st.integers(0, 1000),
    least=st.integers(0, 5),
)
def test_it_fits_and_fills(sizes: list[int], base: int, room: int, least: int) -> None:
    """Full, or the next unit would not fit, or there is no more."""
    least, most = min(least, len(sizes)), len(sizes)

    def size(units: int) -> int:
        return base + sum(sizes[:units])

    units = largest(size, room, least, most)
    assert least <= units <= most
    if size(least) > room:
        assert units == least
    else:
        assert size(units) <= room
        assert size(units) >= FULL * room or units == most or size(units + 1) > room


@pytest.mark.parametrize("needles", [1, 4, 5])
def test_every_depth_comes_once_in_forty_needles(needles: int) -> None:
    for cycle in range(2):
        some = range(cycle * 40 // needles, (cycle + 1) * 40 // needles)
        depths = [depth for index in some for depth in Stream("s", index).depths(needles)]
        assert sorted(depths) == [place / 39 for place in range(40)]


def test_streams_cycles_and_purposes_draw_differently() -> None:
    starts = (("s", 0), ("s", 40), ("t", 0))
    dealt = [[Stream(name, start + index).depths(1) for index in range(40)] for name, start in starts]
    assert dealt[0] not in dealt[1:]
    drawn = {Stream(name, index).rng(use).random() for name in "st" for index in (0, 1) for use in "ab"}
    assert len(drawn) == 8
    assert Stream("s", 0).rng("a").random() in drawn


def test_needles_lie_at_their_depths() -> None:
    assert insert(["a", "b", "c", "d"], [(1.0, "end"), (0.0, "start"), (0.5, "middle")]) == [
        "start", "a", "b", "middle", "c", "d", "end",
    ]  # fmt: skip
    assert insert(["a"], [(0.1, "1"), (0.2, "2"), (0.3, "3")]) == ["1", "2", "3", "a"]
    assert insert([], [(0.1, "1"), (0.9, "2")]) == ["1", "2"]
