"""What budgets lose of ranked importance: what solvers are compared by."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.core.arrays import Floats


def eviction_loss(importance: ArrayLike, budgets: ArrayLike) -> Floats:
    """Sum the importance [..., T] beyond the first b ranked entries, `budgets` [...], float64 (LU-KV, Eq. 6)."""
    ranked = np.asarray(importance, dtype=np.float64)
    lost: Floats = np.where(np.arange(ranked.shape[-1]) >= np.asarray(budgets)[..., None], ranked, 0.0).sum(axis=-1)
    return lost
