"""EvolKV's fitness: how good a candidate is, and how well it keeps to its budget (arXiv 2509.08315, Eq. 1 and 2).

Fitness is f * (1 + lam * CacheScore), to be maximised. It is a product, so f must be positive and larger must be
better; its unit does not matter: a score in percent and one in [0, 1] rank candidates alike. The cache term is soft: a
candidate may be over budget if it is good enough. With lam = 0.3 and gamma = 0.2 a budget that is exceeded by 25 %
costs 1 - 1.225 / 1.3 = 5.8 % of the fitness, one that is undercut by 25 % costs 1.2 %.

A loss has no natural zero, so it cannot be f itself. f = exp(-loss) can: for a negative log-likelihood in nats per
token it is the probability of the right token, averaged geometrically; for a divergence KL(full || candidate) it is 1
where nothing is lost. A constant added to all losses is a factor of f and changes no ranking. The 5.8 % are then
0.059 nats per token.

A score of 0 makes any budget worth nothing: where a metric is zero for all candidates, only losses can tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import UsageError
from kvsearch.naming import suggest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Scope = Literal["group", "global"]


def cache_score(mean: float, budget: float, gamma: float = 0.2) -> float:
    """How well a mean budget keeps to the target c, in [0, 1] (Eq. 2).

    max(0, 1 - (mean - c) / c) above c, and 1 - gamma * (1 - mean / c) up to it.

    Args:
        mean: average entries per kv head of the candidate, see `mean_budget`.
        budget: c, entries per kv head.
        gamma: discount for what is left unused, (0, 1].

    Raises:
        UsageError: an argument is out of range.
    """
    if not (0 <= mean < math.inf and 0 < budget < math.inf):
        raise UsageError(f"budgets must be finite, the target above 0: got a mean of {mean} for a target of {budget}")
    if not 0 < gamma <= 1:
        raise UsageError(f"gamma must be in (0, 1], got {gamma}")
    if mean > budget:
        return max(0.0, 1 - (mean - budget) / budget)
    return 1 - gamma * (1 - mean / budget)


def mean_budget(budgets: Ints, rows: slice | Sequence[int], scope: Scope = "group") -> float:
    """Average entries per kv head that the cache score of a candidate [L, Hkv] is about.

    "group": those of the layers in `rows`, the group that is being searched, as in Algorithm 1. "global": those of all
    layers, as in Eq. 2, which defines the mean over the whole model. The paper is of two minds.

    Raises:
        UsageError: the scope is unknown, or the group is empty.
    """
    if scope not in get_args(Scope):
        raise UsageError(f"unknown scope {scope!r}{suggest(scope, get_args(Scope))}")
    counted = budgets if scope == "global" else budgets[rows if isinstance(rows, slice) else list(rows)]
    if not counted.size:
        raise UsageError("a group without layers has no mean budget")
    return float(counted.mean())


def fitness(score: float, cache: float, lam: float = 0.3) -> float:
    """Fitness of a candidate, larger is better: score * (1 + lam * cache) (Eq. 1; Algorithm 1, line 13).

    Args:
        score: f, 0 or more, larger is better; see `loss_score` for losses. NaN, of a candidate that failed, stays NaN.
        cache: `cache_score`, in [0, 1].
        lam: weight of the cache term, 0 or more; 0 ranks by the score alone.

    Raises:
        UsageError: an argument is out of range.
    """
    if score < 0 or math.isinf(score):
        raise UsageError(f"a score must be finite and 0 or more, got {score}: turn losses into scores first")
    if not 0 <= cache <= 1:
        raise UsageError(f"a cache score must be in [0, 1], got {cache}")
    if not 0 <= lam < math.inf:
        raise UsageError(f"lam must be finite and 0 or more, got {lam}")
    return score * (1 + lam * cache)


def loss_score(loss: float) -> float:
    """exp(-loss), the score of a loss in nats per token: larger is better, positive. NaN stays NaN."""
    return math.exp(-loss)
