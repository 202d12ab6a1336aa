"""Budgets that nothing measured decides: even ones, and PyramidKV's line."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.allocator import Allocator, Signals, Uniform
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.core.errors import UsageError
from kvsearch.testing.allocator_contract import HEADS, LAYERS, AllocatorContract
from tests.budgets.samples import bounds

UNREAD = np.zeros(1)


class TestPyramid(AllocatorContract):
    def allocator(self) -> Allocator:
        return Pyramid()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.random((LAYERS, HEADS))


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("cap", "expected"), [(1000, [18, 14, 10, 6]), (16, [16, 13, 11, 8])])
def test_worked_examples(heads: int, cap: int, expected: list[int]) -> None:
    # Free budgets 14, 10, 6, 2; with 12 entries beyond the window 12, 9 1/3, 6 2/3, 4 rounded.
    budgets = Pyramid(beta=4, window=4).allocate(UNREAD, 48 * heads, *bounds(4, heads, 4, cap))
    assert budgets.tolist() == [[kept] * heads for kept in expected]


@pytest.mark.parametrize(
    ("layers", "budget", "window", "overshoot"), [(32, 128, 8, 176), (32, 128, 32, 464), (32, 512, 8, 448)]
)
def test_the_total_is_exact_where_whole_steps_overshoot(layers: int, budget: int, window: int, overshoot: int) -> None:
    free = budget - window
    smallest = free // 20
    largest = 2 * free - smallest
    step = (largest - smallest) // (layers - 1)
    assert sum(largest - layer * step for layer in range(layers)) == free * layers + overshoot
    budgets = Pyramid(window=window).allocate(UNREAD, budget * layers * 2, *bounds(layers, 2, window, 4096))
    assert budgets.sum() == budget * layers * 2
    assert (budgets[:, 0] == budgets[:, 1]).all()
    assert budgets[0, 0] == window + largest
    assert budgets[-1, 0] == window + smallest
    line = window + np.linspace(largest, smallest, layers)
    assert np.abs(budgets[:, 0] - line).max() < 1


def test_one_layer_gets_the_mean() -> None:
    assert Pyramid().allocate(UNREAD, 40, *bounds(1, 4, 8, 100)).tolist() == [[10] * 4]
    assert Pyramid().allocate(UNREAD, 9, *bounds(1, 1, 0, 100)).tolist() == [[9]]


def test_a_total_below_the_window_is_shared_equally() -> None:
    assert Pyramid(window=8).allocate(UNREAD, 20, *bounds(4, 1, 0, 100)).tolist() == [[5]] * 4
    assert Pyramid(window=8).allocate(UNREAD, 32, *bounds(4, 1, 0, 100)).tolist() == [[8]] * 4


def test_a_flat_line_where_nothing_is_left_to_tilt() -> None:
    assert Pyramid(window=2).allocate(UNREAD, 40, *bounds(4, 1, 2, 10)).tolist() == [[10]] * 4
    assert Pyramid(beta=1, window=2).allocate(UNREAD, 24, *bounds(4, 1, 2, 10)).tolist() == [[6]] * 4


@pytest.mark.parametrize("options", [{"beta": 0.5}, {"beta": float("nan")}, {"beta": float("inf")}, {"window": -1}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Pyramid(**options)  # type: ignore[arg-type]


class TestUniform(TestPyramid):
    def allocator(self) -> Allocator:
        return Uniform()
