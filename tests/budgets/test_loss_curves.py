"""Budgets from loss curves: worked by hand, optimal among all integer splits, exact totals within bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.allocator import Allocator, Signals
from kvsearch.budgets.loss_curves import LossCurves, make_convex
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.testing.allocator_contract import LAYERS, LENGTH
from tests.budgets.samples import Contract, bounds

BUDGETS = (2, 5, 9)


class TestLossCurves(Contract):
    def allocator(self) -> Allocator:
        return LossCurves((2, 7, 20, LENGTH))

    def signals(self, rng: np.random.Generator) -> Signals:
        return -np.sort(-rng.pareto(1.1, (LAYERS, 3)), axis=1)

    def scaled(self, signals: Signals, layer: int, head: int) -> Signals:
        raised = signals.copy()
        raised[layer] *= 2
        return raised


def gains(losses: Floats) -> Floats:
    """Loss that an entry saves, [L, pieces]."""
    whole = np.append(losses, np.zeros((len(losses), 1)), axis=1)
    return -np.diff(make_convex(np.array(BUDGETS, dtype=float), whole), axis=1) / np.diff(BUDGETS)


def test_a_worked_example() -> None:
    # gains per entry: layer 0 saves 3 up to 5, then 1 up to 9; layer 1 saves 2 up to 5, then 0.5; layer 2 nothing
    losses = np.array([[13.0, 4.0], [8.0, 2.0], [0.0, 0.0]])
    np.testing.assert_allclose(gains(losses), [[3, 1], [2, 0.5], [0, 0]])
    curves = LossCurves(BUDGETS)
    expected = {
        8: [4, 2, 2],
        9: [5, 2, 2],
        12: [5, 5, 2],
        14: [7, 5, 2],
        16: [9, 5, 2],
        20: [9, 9, 2],
        24: [9, 9, 6],  # no layer loses anything more: the smallest is raised
        30: [10, 10, 10],
    }
    for total, budgets in expected.items():
        assert curves.allocate(losses, total, *bounds(3)).ravel().tolist() == budgets
        doubled = curves.allocate(losses, 2 * total, *bounds(3, heads=2))
        assert doubled.tolist() == [[kept] * 2 for kept in budgets]
    equal = np.array([[6.0, 3.0], [6.0, 3.0], [0.0, 0.0]])
    assert curves.allocate(equal, 11, *bounds(3)).ravel().tolist() == [5, 4, 2]
    assert curves.allocate(losses[[0, 2]], 25, *bounds(2, heads=3)).tolist() == [[7, 6, 6], [2, 2, 2]]


def test_no_layer_gets_less_than_was_measured_as_long_as_the_total_permits() -> None:
    steep = np.array([[100.0, 50.0], [0.0, 0.0], [0.0, 0.0]])
    assert LossCurves(BUDGETS).allocate(steep, 12, *bounds(3)).ravel().tolist() == [8, 2, 2]
    assert LossCurves(BUDGETS).allocate(steep, 5, *bounds(3)).ravel().tolist() == [2, 2, 1]
    low = np.array([[1], [4], [1]])
    assert LossCurves(BUDGETS).allocate(steep, 12, low, np.full((3, 1), 100)).ravel().tolist() == [6, 4, 2]


def test_a_pattern_for_what_each_layer_gets() -> None:
    # layer 0 loses nothing under pattern 1; in layer 1 pattern 0 is best at 2 and pattern 1 at 5
    losses = np.array([[[4.0, 2.0], [0.0, 0.0]], [[6.0, 3.0], [7.0, 1.0]]])
    curves = LossCurves(BUDGETS)
    for total, expected in ((7, ([2, 5], [1, 1])), (5, ([2, 3], [1, 0])), (0, ([0, 0], [1, 0]))):
        budgets, best = curves.allocate_jointly(losses, total, *bounds(2))
        assert (budgets.ravel().tolist(), best.tolist()) == expected


@given(
    st.lists(st.lists(st.integers(-2, 20), min_size=2, max_size=2), min_size=1, max_size=3),
    st.integers(0, 27),
    st.lists(st.integers(9, 12), min_size=3, max_size=3),
)
def test_nothing_beats_it_among_all_integer_splits(drawn: list[list[int]], above: int, caps: list[int]) -> None:
    losses, least = np.array(drawn, dtype=float), BUDGETS[0]
    layers, high = len(losses), np.array(caps[: len(drawn)])[:, None]
    total = min(least * layers + above, int(high.sum()))
    hull = make_convex(np.array(BUDGETS, dtype=float), np.c_[np.maximum(losses, 0), np.zeros(layers)])

    def lost(budgets: Floats) -> float:
        return sum(float(np.interp(kept, BUDGETS, row)) for kept, row in zip(budgets, hull, strict=True))

    found = LossCurves(BUDGETS).allocate(losses, total, np.zeros((layers, 1), dtype=np.int64), high)
    every = product(*(range(least, cap + 1) for cap in high.ravel().tolist()))
    best = min(lost(np.array(split)) for split in every if sum(split) == total)
    assert found.sum() == total
    assert lost(found.ravel()) <= best + 1e-9


@given(st.integers(0, 2**32))
def test_hulls_are_convex_below_the_curve_and_keep_its_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.integers(1, 9, 6)).astype(float)
    values = rng.pareto(1.1, (2, 6))
    hull = make_convex(at, values)
    slopes = np.diff(hull, axis=1) / np.diff(at)
    assert (np.diff(slopes, axis=1) >= -1e-9 * np.abs(values).max()).all()
    assert (hull <= values + 1e-12 * values.max()).all()
    np.testing.assert_array_equal(hull[:, [0, -1]], values[:, [0, -1]])


def test_losses_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="losses must be finite"):
        LossCurves(BUDGETS).allocate(np.full((2, 2), np.nan), 10, *bounds(2))
