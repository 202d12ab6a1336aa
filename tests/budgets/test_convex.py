"""Convex curves: blocks of equal gains, recall curves, and the enumeration that solvers are held against."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from kvsearch.budgets.convex import compute_oracle_recall, compute_recall, sort_as_oracle
from kvsearch.budgets.lukv import solve_exactly
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from tests.budgets.samples import eviction_loss, marginal_gains, tables


def concave_majorant(x: Floats) -> Floats:
    """Least concave majorant of the prefix sums by its definition: the highest chord over every budget."""
    prefix = np.concatenate([[0.0], np.cumsum(x)])
    hull = prefix.copy()
    for left in range(len(prefix)):
        for right in range(left + 1, len(prefix)):
            inside = np.arange(left, right + 1)
            chord = prefix[left] + (prefix[right] - prefix[left]) * (inside - left) / (right - left)
            hull[inside] = np.maximum(hull[inside], chord)
    return hull


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([1, 5, 3, 1], [3, 3, 3, 1]),
        ([4, 2, 2, 2], [4, 2, 2, 2]),
        ([1, 1, 1, 5], [2, 2, 2, 2]),
        ([3, 2, 1, 1], [3, 2, 1, 1]),
        ([0, 0, 0], [0, 0, 0]),
        ([7], [7]),
    ],
)
def test_worked_examples(x: list[int], expected: list[int]) -> None:
    assert marginal_gains(x).tolist() == expected


@given(tables(length=12))
def test_gains_are_the_slopes_of_the_concave_majorant(table: Floats) -> None:
    gains = marginal_gains(table)
    assert gains.shape == table.shape
    assert (np.diff(gains, axis=-1) <= 0).all()
    assert np.allclose(gains.sum(-1), table.sum(-1))
    for x, g in zip(table.reshape(-1, table.shape[-1]), gains.reshape(-1, table.shape[-1]), strict=True):
        above = np.concatenate([[0.0], np.cumsum(g)])
        true = np.concatenate([[0.0], np.cumsum(x)])
        assert np.allclose(above, concave_majorant(x))
        assert (above >= true - 1e-9 * (1 + true[-1])).all()
        ends = np.flatnonzero(np.append(np.diff(g) != 0, True)) + 1
        assert np.allclose(above[ends], true[ends])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
def test_refusals_name_the_place(bad: float) -> None:
    with pytest.raises(UsageError, match=rf"{bad} at \[1, 2\]"):
        sort_as_oracle([[1.0, 2.0, 3.0], [1.0, 2.0, bad]])


A = [1.0, 5, 3, 1]


def test_worked_example() -> None:
    assert compute_recall(A).tolist() == pytest.approx([0, 0.1, 0.6, 0.9, 1])
    assert compute_oracle_recall(A).tolist() == pytest.approx([0, 0.5, 0.8, 0.9, 1])
    assert sort_as_oracle(A).tolist() == [5, 3, 1, 1]


def test_protected_entries_stay_in_front() -> None:
    """No ranking decides about them: with two of them an important third entry must not take their place."""
    assert sort_as_oracle([1.0, 0, 3, 5, 2], 2).tolist() == [1, 0, 5, 3, 2]
    assert sort_as_oracle([[1.0, 0, 3], [0, 0, 9]], 9).tolist() == [[1, 0, 3], [0, 0, 9]]


def test_a_head_without_importance_loses_nothing() -> None:
    assert compute_recall([0.0, 0.0]).tolist() == [1, 1, 1]


@given(tables())
def test_curves_rise_to_one_below_the_oracle(table: Floats) -> None:
    curve, oracle = compute_recall(table), compute_oracle_recall(table)
    assert curve.shape == (*table.shape[:-1], table.shape[-1] + 1)
    assert (np.diff(curve, axis=-1) >= 0).all()
    assert np.allclose(curve[..., -1], 1)
    assert (curve <= oracle + 1e-12).all()
    mass = table.sum(-1, keepdims=True)
    for budget in range(table.shape[-1] + 1):
        lost = eviction_loss(table, np.full(table.shape[:-1], budget))
        assert np.allclose(lost, (mass * (1 - curve))[..., budget])


@given(tables(heads=2, length=4))
def test_equals_enumeration(table: Floats) -> None:
    heads = table.shape[:-1]
    floors = np.minimum(1, np.arange(np.prod(heads)).reshape(heads))
    every = [np.reshape(b, heads) for b in itertools.product(range(table.shape[-1] + 1), repeat=int(np.prod(heads)))]
    totals = range(int(floors.sum()), table.size + 1)
    for total, budgets in zip(totals, solve_exactly(table, totals, floors), strict=True):
        least = min(eviction_loss(table, b).sum() for b in every if b.sum() == total and (b >= floors).all())
        assert budgets.sum() == total
        assert (budgets >= floors).all()
        assert eviction_loss(table, budgets).sum() == pytest.approx(least, abs=1e-9)
