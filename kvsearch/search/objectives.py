"""What a search is judged by: its objective, and the fitness that EvolKV makes of it (arXiv 2509.08315, Eq. 1 and 2).

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
from dataclasses import dataclass
from typing import Final

from kvsearch.search.settings import ObjectiveName


@dataclass(frozen=True)
class Objective:
    """One way to judge a candidate on a sample.

    `free_running`: on its own reply, where higher is better, else on a teacher-forced answer, where lower is.
    """

    name: ObjectiveName
    free_running: bool = False
    needs_full: bool = False  # of every sample, what the full cache says


OBJECTIVES: Final[dict[str, Objective]] = {
    "nll": Objective("nll"),  # mean negative log-likelihood of the answer's tokens, in nats
    "kl": Objective("kl", needs_full=True),  # mean divergence KL(full cache || candidate) over these tokens, in nats
    "metric": Objective("metric", free_running=True),  # the task's metric of the greedy reply, 0 to 1
}


def cache_score(mean: float, budget: float, gamma: float = 0.2) -> float:
    """Return how well a mean budget keeps to the target c, in [0, 1] (Eq. 2).

    max(0, 1 - (mean - c) / c) above c, and 1 - gamma * (1 - mean / c) up to it.

    Args:
        mean: average entries per kv head of the layers that are being searched, as in Algorithm 1; Eq. 2 defines the
            mean over the whole model, the paper is of two minds.
        budget: c, entries per kv head.
        gamma: discount for what is left unused, (0, 1].
    """
    if mean > budget:
        return max(0.0, 1 - (mean - budget) / budget)
    return 1 - gamma * (1 - mean / budget)


def fitness(score: float, cache: float, lam: float = 0.3) -> float:
    """Return the fitness of a candidate, larger is better: score * (1 + lam * cache) (Eq. 1; Algorithm 1, line 13).

    Args:
        score: f, 0 or more, larger is better; see `loss_score` for losses. NaN, of a candidate that failed, stays NaN.
        cache: `cache_score`, in [0, 1].
        lam: weight of the cache term, 0 or more; 0 ranks by the score alone.
    """
    return score * (1 + lam * cache)


def loss_score(loss: float) -> float:
    """Return exp(-loss), the score of a loss in nats per token: larger is better, positive. NaN stays NaN."""
    return math.exp(-loss)
