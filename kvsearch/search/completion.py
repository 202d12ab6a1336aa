"""Completing budgets to a total, and carrying them over to another average budget (EvolKV, arXiv 2509.08315)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsearch.errors import UsageError
from kvsearch.plan.rounding import water_fill

Ints = NDArray[np.int64]


def complete(
    budgets: Ints, total: int, floors: ArrayLike = 0, caps: ArrayLike | None = None, literal: bool = False
) -> Ints:
    """Scale budgets to a total (section 3.2, "KV Cache Budget Completion").

    The paper's rule is b_i = ceil(k_i + k_i / A * (T - A)), the ceiling of k_i * T / A, where A is the sum of all k_i
    and T the total wanted, c * L for an average of c. For L layers that is up to L - 1 entries too many: for T = 240
    [101, 50, 30, 20] becomes [121, 60, 36, 24], which is 241. By default the same shares are water-filled between the
    bounds and rounded by largest remainders, so that the sum is T: [120, 60, 36, 24].

    Args:
        budgets: entries, any shape: per layer [L] or per head [L, Hkv].
        total: T, in entries of all budgets together.
        floors: whole numbers >= 0 that broadcast to the shape of `budgets`.
        caps: likewise; None means no upper bound.
        literal: the paper's rule, then bounds on top of it, which move the sum further off.

    Returns:
        int64 array of the shape of `budgets`.

    Raises:
        UsageError: all budgets are 0, one is negative, or the bounds do not admit the total.
    """
    given = np.asarray(budgets, dtype=np.int64)
    amount = int(given.sum())
    if amount <= 0 or given.min() < 0:
        raise UsageError(f"budgets to be completed must be 0 or more and not all 0, got a sum of {amount}")
    if not literal:
        return water_fill(given, total, floors, caps)
    ceilings = [-(-entries * total // amount) for entries in given.ravel().tolist()]
    scaled = np.array(ceilings, dtype=np.int64).reshape(given.shape)
    bounded: Ints = np.maximum(scaled if caps is None else np.minimum(scaled, caps), floors).astype(np.int64)
    return bounded


def extrapolate(
    budgets: Ints, average: int, floors: ArrayLike, caps: ArrayLike | None = None, literal: bool = False
) -> Ints:
    """The same shares at another average budget c' (section 4.2.1): completed to c' times the number of budgets.

    A smaller c' would take layers below what the policy protects, of which the paper says nothing: give
    window + sinks + 1 entries as floors. Arguments, result and errors are those of `complete`.
    """
    return complete(budgets, average * np.asarray(budgets).size, floors, caps, literal)
