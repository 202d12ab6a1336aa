from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvsearch.budgets.convex import oracle_recall_curve, recall_curve, without_gap
from kvsearch.core.arrays import Floats
from tests.budgets.loss import eviction_loss
from tests.budgets.samples import tables

A = [1.0, 5, 3, 1]


def test_worked_example() -> None:
    assert recall_curve(A).tolist() == pytest.approx([0, 0.1, 0.6, 0.9, 1])
    assert oracle_recall_curve(A).tolist() == pytest.approx([0, 0.5, 0.8, 0.9, 1])
    assert without_gap(A).tolist() == [5, 3, 1, 1]


def test_protected_entries_stay_in_front() -> None:
    """No ranking decides about them: with two of them an important third entry must not take their place."""
    assert without_gap([1.0, 0, 3, 5, 2], 2).tolist() == [1, 0, 5, 3, 2]
    assert without_gap([[1.0, 0, 3], [0, 0, 9]], 9).tolist() == [[1, 0, 3], [0, 0, 9]]


def test_a_head_without_importance_loses_nothing() -> None:
    assert recall_curve([0.0, 0.0]).tolist() == [1, 1, 1]


@given(tables())
def test_curves_rise_to_one_below_the_oracle(table: Floats) -> None:
    curve, oracle = recall_curve(table), oracle_recall_curve(table)
    assert curve.shape == (*table.shape[:-1], table.shape[-1] + 1)
    assert (np.diff(curve, axis=-1) >= 0).all()
    assert np.allclose(curve[..., -1], 1)
    assert (curve <= oracle + 1e-12).all()
    mass = table.sum(-1, keepdims=True)
    for budget in range(table.shape[-1] + 1):
        lost = eviction_loss(table, np.full(table.shape[:-1], budget))
        assert np.allclose(lost, (mass * (1 - curve))[..., budget])
