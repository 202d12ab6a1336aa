"""LAVa: layer budgets by how spread out a layer's scores are, head budgets by where the highest are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.budgets.adaptive import check_options, split_layers
from kvsearch.budgets.base import Ints, Signals
from kvsearch.budgets.bounds import check_signals, head_scores, share_above
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import water_fill

Mode = Literal["dynamic", "equal"]


def layer_entropy(scores: ArrayLike) -> float:
    """Entropy of one layer's scores as a share of its maximum: -sum p * log(p) / log(Hkv * M), p = s / sum s.

    In [0, 1]: 0 when one entry holds everything, 1 when all are equal; also 1 without any score and 0 for less than two
    candidates. The paper divides by Hkv * N; a divisor that is equal in all layers cancels in their shares.

    Args:
        scores: [Hkv, M] of the layer's candidates, >= 0, in any unit.

    Raises:
        UsageError: a score is negative or not finite.
    """
    values = check_signals(np.asarray(scores), "scores", 0.0).ravel()
    if values.size < 2:
        return 0.0
    if not values.any():
        return 1.0
    shares = values / values.max()  # first, so that no sum overflows
    shares = shares[shares > 0] / shares.sum()
    shares = shares[shares > 0]
    return float(min(max(-(shares * np.log(shares)).sum() / np.log(values.size), 0.0), 1.0))


def layer_pools(entropies: ArrayLike, pool: int, caps: ArrayLike | None = None) -> Ints:
    """Share `pool` entries over layers in proportion to their entropies, within caps, to the exact total.

    Args:
        entropies: [L], >= 0, in any unit; all zero means equal pools.
        pool: entries of all layers together, beyond what is protected.
        caps: most entries per layer, a number or [L]; None means no bound.

    Returns:
        int64 [L] that sums to `pool`.

    Raises:
        UsageError: an entropy is negative or not finite; `pool` is outside [0, sum of caps].
    """
    return water_fill(check_signals(np.asarray(entropies), "entropies", 0.0), pool, 0, caps)


@dataclass(frozen=True)
class LAVa:
    """LAVa (Shen et al. 2025, arXiv 2509.09754, Algorithm 2): the free entries of all layers are one pool.

    Layer l gets the share e_l / sum_j e_j of the pool, e its `layer_entropy`, and splits it over its heads as AdaKV
    does. The signals are scores [L, Hkv, M] of the candidates, without the window: the floors stand for that, and caps
    above floor + M count as floor + M. A layer with a single spike has next to no entropy and gets little more than its
    floors. The official code's truncated pools and stale head floors, 4.5 % over a budget of 128, are not reproduced.

    Args:
        floor_share: share of a layer's even budget that every head is sure of, in [0, 1]; the paper has 0, its code
            0.2.
        heads: "equal" gives the heads of a layer the same, the paper's ablation of dynamic head budgets.
        layers: "equal" gives every layer the same, the paper's ablation of dynamic layer budgets.
    """

    name: ClassVar[str] = "lava"
    floor_share: float = 0.2
    heads: Mode = "dynamic"
    layers: Mode = "dynamic"

    def __post_init__(self) -> None:
        check_options(self.floor_share)
        for option, value in (("heads", self.heads), ("layers", self.layers)):
            if value not in get_args(Mode):
                raise UsageError(f"{option} must be {' or '.join(get_args(Mode))}, got {value!r}")

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Allocate `total` entries by scores [L, Hkv, M]: int64 [L, Hkv].

        Raises:
            UsageError: scores are negative, not finite or of another shape; `total` is outside [sum of floors, sum of
                caps].
        """
        scores, low, high = head_scores(signals, total, floors, caps, 0.0)
        held, room = low.sum(axis=1), (high - low).sum(axis=1)
        entropies = np.array([layer_entropy(layer) for layer in scores])
        if self.heads == "equal":
            if self.layers == "equal":
                return water_fill(np.ones(low.shape), total, low, high)
            return share_above(entropies[:, None], total, low, high)
        if self.layers == "equal":
            free = water_fill(np.ones(len(low)), total, held, held + room) - held
        else:
            free = layer_pools(entropies, total - int(held.sum()), room)
        return split_layers(scores, free, low, high, self.floor_share)
