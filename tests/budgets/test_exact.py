from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from kvsearch.budgets.lukv import exact_budgets
from kvsearch.core.arrays import Floats
from tests.budgets.loss import eviction_loss
from tests.budgets.samples import tables


@given(tables(heads=2, length=4))
def test_equals_enumeration(table: Floats) -> None:
    heads = table.shape[:-1]
    floors = np.minimum(1, np.arange(np.prod(heads)).reshape(heads))
    every = [np.reshape(b, heads) for b in itertools.product(range(table.shape[-1] + 1), repeat=int(np.prod(heads)))]
    for total in range(int(floors.sum()), table.size + 1):
        least = min(eviction_loss(table, b).sum() for b in every if b.sum() == total and (b >= floors).all())
        budgets = exact_budgets(table, total, floors)
        assert budgets.sum() == total
        assert (budgets >= floors).all()
        assert eviction_loss(table, budgets).sum() == pytest.approx(least, abs=1e-9)
