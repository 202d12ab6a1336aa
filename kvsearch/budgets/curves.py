"""How far a ranking is from the oracle, budget by budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.arrays import Floats
from kvsearch.budgets.convex import check_importance


def without_gap(importance: ArrayLike, protected: int = 0) -> Floats:
    """Sort importance in descending order along the last axis, as if the ranking were the oracle's.

    The first `protected` entries stay in front in their order, as no ranking decides about them. Solving with it is the
    ablation of the optimality gap; evict with the real ranking (LU-KV, "w/o gap").
    """
    checked = check_importance(importance)
    fixed, ranked = checked[..., :protected], checked[..., protected:]
    return np.concatenate([fixed, -np.sort(-ranked, axis=-1)], axis=-1)


def recall_curve(importance: ArrayLike) -> Floats:
    """Share of the importance a ranking keeps at every budget: [..., T] -> float64 [..., T + 1], index = budget.

    A head without any importance has nothing to lose: its recall is 1 at every budget.
    """
    ranked = check_importance(importance)
    kept = np.zeros((*ranked.shape[:-1], ranked.shape[-1] + 1))
    np.cumsum(ranked, axis=-1, out=kept[..., 1:])
    mass = kept[..., -1:]
    return np.divide(kept, mass, out=np.ones_like(kept), where=mass > 0)


def oracle_recall_curve(importance: ArrayLike) -> Floats:
    """Share of the importance the best possible ranking keeps at every budget: [..., T] -> float64 [..., T + 1]."""
    return recall_curve(without_gap(importance))
