"""Budgets of layers by signals, and those that nothing measured decides: even ones, and PyramidKV's line."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.allocator import Allocator, Signals, Uniform
from kvsearch.budgets.polykv import Proportional
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.testing.allocator_contract import HEADS, LAYERS
from tests.budgets.samples import Contract, bounds


class TestByLayer(Contract):
    def allocator(self) -> Allocator:
        return Proportional()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.pareto(1.1, LAYERS)


class TestByHead(TestByLayer):
    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.pareto(1.1, (LAYERS, HEADS))


class TestInverse(TestByHead):
    def allocator(self) -> Allocator:
        return Proportional(direction="inverse")

    def bounds(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        # The same bounds everywhere, so that any order of the forward budgets is within them.
        shape = LAYERS, HEADS
        return np.full(shape, rng.integers(0, 6)), np.full(shape, rng.integers(20, 40))

    def scaled(self, signals: Signals, layer: int, head: int) -> Signals:
        lowered = signals.copy()
        lowered[layer, head] /= 2
        return lowered


@pytest.mark.parametrize("heads", [1, 3])
def test_worked_examples(heads: int) -> None:
    for allocator, expected in (
        (Proportional(), [6, 9, 11, 14]),
        (Proportional("inverse"), [14, 11, 9, 6]),
    ):
        budgets = allocator.allocate(np.array([1.0, 2, 3, 4]), 40 * heads, *bounds(4, heads, floor=4))
        assert budgets.tolist() == [[kept] * heads for kept in expected]
    # The least budget may come from the option as well as from the floors.
    budgets = Proportional(least=4).allocate(np.array([1.0, 2, 3, 4]), 40, *bounds(4))
    assert budgets.ravel().tolist() == [6, 9, 11, 14]
    assert Proportional(least=9).allocate(np.array([1.0, 2, 3, 4]), 20, *bounds(4)).ravel().tolist() == [5] * 4


def test_the_least_budget_is_a_tenth_of_the_mean() -> None:
    spike = np.array([0.0, 1.0, 0.0, 0.0])
    assert Proportional().allocate(spike, 200, *bounds(4)).ravel().tolist() == [5, 185, 5, 5]
    assert Proportional().allocate(spike, 200, *bounds(4, floor=9)).ravel().tolist() == [9, 173, 9, 9]
    assert Proportional(least=0).allocate(spike, 200, *bounds(4)).ravel().tolist() == [0, 200, 0, 0]


def test_negative_signals_count_as_zero_and_never_fall_below_the_least() -> None:
    # Left negative, the second layer would get 4 + 24 * -1 / 7 = 0.57.
    budgets = Proportional().allocate(np.array([1.0, -1, 3, 4]), 40, *bounds(4, floor=4))
    assert budgets.ravel().tolist() == [7, 4, 13, 16]
    assert Proportional().allocate(np.array([-1.0, -5]), 20, *bounds(2)).ravel().tolist() == [10, 10]


def test_a_zero_signal_counts_a_millionth_of_the_mean() -> None:
    for unit in (1.0, 1e3, 1e200):
        budgets = Proportional(least=0).allocate(unit * np.array([0.0, 1.0]), 10**7, *bounds(2, cap=10**8))
        assert budgets.ravel().tolist() == [5, 10**7 - 5]
    noise = Proportional(least=0).allocate(np.array([0.0, 1e-16]), 10**3, *bounds(2))
    assert noise.ravel().tolist() == [500, 500]
    for allocator in (Proportional(), Proportional("inverse")):
        assert allocator.allocate(np.zeros(3), 30, *bounds(3)).ravel().tolist() == [10, 10, 10]


def test_the_inverse_has_the_same_budgets_in_reversed_order() -> None:
    rng = np.random.default_rng(4)
    for shape in ((7,), (7, 3)):
        for _ in range(50):
            signals = np.round(rng.pareto(1.1, shape), 1)
            total = int(rng.integers(0, 21 * 60))
            forward = Proportional().allocate(signals, total, *bounds(7, 3))
            inverse = Proportional("inverse").allocate(signals, total, *bounds(7, 3))
            assert sorted(forward.flat) == sorted(inverse.flat)
            units, mirrored = forward.reshape(signals.size, -1).sum(1), inverse.reshape(signals.size, -1).sum(1)
            order = np.argsort(signals.ravel(), kind="stable")
            assert (np.diff(mirrored[order[np.append(np.diff(signals.ravel()[order]) > 0, True)]]) <= 0).all()
            assert sorted(units) == sorted(mirrored)
            assert mirrored[signals.argmax()] == units.min()


def test_an_inverse_outside_the_bounds_is_brought_inside() -> None:
    floors, caps = np.array([[0], [0], [10]]), np.array([[12], [50], [50]])
    signals = np.array([1.0, 2.0, 6.0])
    assert Proportional(least=0).allocate(signals, 46, floors, caps).ravel().tolist() == [4, 8, 34]
    # 34, 8, 4 becomes 12, 8, 10; the missing 16 go where the budget exceeds what was wanted least.
    assert Proportional("inverse", 0).allocate(signals, 46, floors, caps).ravel().tolist() == [12, 19, 15]


def test_refusals() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UsageError, match=rf"sensitivities must be finite, got {bad} at \[1\]"):
            Proportional().allocate(np.array([1.0, bad]), 4, *bounds(2))


UNREAD = np.zeros(1)


class TestPyramid(Contract):
    def allocator(self) -> Allocator:
        return Pyramid()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.random((LAYERS, HEADS))


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("cap", "expected"), [(1000, [18, 14, 10, 6]), (16, [16, 13, 11, 8])])
def test_worked_examples_of_a_pyramid(heads: int, cap: int, expected: list[int]) -> None:
    # Free budgets 14, 10, 6, 2; with 12 entries beyond the window 12, 9 1/3, 6 2/3, 4 rounded.
    budgets = Pyramid(beta=4, window=4).allocate(UNREAD, 48 * heads, *bounds(4, heads, 4, cap))
    assert budgets.tolist() == [[kept] * heads for kept in expected]


def test_a_flat_line_where_nothing_is_left_to_tilt() -> None:
    assert Pyramid().allocate(UNREAD, 40, *bounds(1, 4, 8, 100)).tolist() == [[10] * 4]  # of one layer
    assert Pyramid(window=8).allocate(UNREAD, 20, *bounds(4, 1, 0, 100)).tolist() == [[5]] * 4  # below the window
    assert Pyramid(window=2).allocate(UNREAD, 40, *bounds(4, 1, 2, 10)).tolist() == [[10]] * 4
    assert Pyramid(beta=1, window=2).allocate(UNREAD, 24, *bounds(4, 1, 2, 10)).tolist() == [[6]] * 4


@pytest.mark.parametrize("options", [{"beta": 0.5}, {"beta": float("nan")}, {"window": -1}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Pyramid(**options)  # type: ignore[arg-type]


class TestUniform(TestPyramid):
    def allocator(self) -> Allocator:
        return Uniform()
