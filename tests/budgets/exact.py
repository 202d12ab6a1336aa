"""The exact optimum by dynamic programming: the yardstick for `MarginalSolver` on small instances."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.core.arrays import Floats, Ints


def eviction_loss(importance: ArrayLike, budgets: ArrayLike) -> Floats:
    """Sum the importance [..., T] beyond the first b ranked entries, `budgets` [...], float64 (LU-KV, Eq. 6)."""
    ranked = np.asarray(importance, dtype=np.float64)
    lost: Floats = np.where(np.arange(ranked.shape[-1]) >= np.asarray(budgets)[..., None], ranked, 0.0).sum(axis=-1)
    return lost


def exact_budgets(importance: ArrayLike, total: int, floors: ArrayLike = 0) -> Ints:
    """Maximise the importance kept by prefixes of every head, a multiple-choice knapsack in O(heads * T * total).

    Args:
        importance: [L, Hkv, T] in the ranking's order.
        total: entries of all heads together, between the sum of the floors and L * Hkv * T.
        floors: least entries per head, broadcasts to [L, Hkv].

    Returns:
        int64 [L, Hkv] that sums to `total`.
    """
    values = np.asarray(importance, dtype=np.float64)
    heads = values.shape[:-1]
    low = np.broadcast_to(np.asarray(floors, dtype=np.int64), heads)
    rows = values.reshape(-1, values.shape[-1])
    choices = _choices(rows, low.ravel(), total)
    budgets = np.zeros(len(rows), dtype=np.int64)
    for head in reversed(range(len(rows))):
        budgets[head] = choices[head, total]
        total -= int(budgets[head])
    return budgets.reshape(heads)


def _choices(rows: Floats, floors: Ints, total: int) -> Ints:
    """Find head h's budget when heads 0 ... h share t entries at best: [heads, total + 1], -1 where they cannot."""
    choices = np.full((len(rows), total + 1), -1, dtype=np.int64)
    best = np.full(total + 1, -np.inf)
    best[0] = 0.0
    for head, row in enumerate(rows):
        kept = np.concatenate([[0.0], np.cumsum(row)])
        grown = np.full(total + 1, -np.inf)
        for budget in range(int(floors[head]), min(len(row), total) + 1):
            value = best[: total + 1 - budget] + kept[budget]
            better = value > grown[budget:]
            grown[budget:][better] = value[better]
            choices[head, budget:][better] = budget
        best = grown
    return choices
