"""Budgets of dynamic allocations where the scores of all layers are known at once: what a prompt's layers add up to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from kvsearch.budgets.adakv import AdaKVAllocation, Variant, order_heads, split_heads
from kvsearch.budgets.allocator import Signals
from kvsearch.budgets.dynamic import LayerDemand, share_budgets
from kvsearch.budgets.lava import LAVaAllocation, compute_layer_entropy
from kvsearch.core.arrays import Floats, Ints
from kvsearch.plan.rounding import check_bounds, water_fill


@dataclass(frozen=True)
class OfScores:
    """An allocation as an allocator of scores [L, Hkv, M]: all entries but the protected ones, which the floors hold.

    Caps above floor + M count as floor + M; planned layers are even.
    """

    allocation: AdaKVAllocation | LAVaAllocation

    @property
    def name(self) -> str:
        return self.allocation.name

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        low, high = check_bounds(floors.shape, total, floors, np.minimum(caps, floors + signals.shape[2]))
        layers = water_fill(np.ones(len(low)), total, low.sum(1), high.sum(1)).tolist()
        even = np.array([water_fill(np.ones(low.shape[1]), layer, 0) for layer in layers], dtype=np.int64)
        ranked = torch.from_numpy(-np.sort(-signals.astype(np.float64), axis=2))

        def demand(layer: int, free: int) -> LayerDemand:
            weight = float(compute_layer_entropy(ranked[layer])) if self.allocation.shares_layers else 1.0
            layer_scores = ranked[layer]
            allocation = self.allocation
            return LayerDemand(weight, allocation.order(layer_scores, free), allocation.scores(layer_scores, free))

        return share_budgets(self.allocation, even.reshape(low.shape), low, high, demand)


def adakv(floor_share: float = 0.2, variant: Variant = "exact") -> OfScores:
    return OfScores(AdaKVAllocation(floor_share, variant))


def head_budgets(
    scores: ArrayLike,
    free: int,
    floor_share: float = 0.2,
    variant: Variant = "exact",
    most: ArrayLike | None = None,
) -> Ints:
    """AdaKV's budgets of one layer beyond what is protected, int64 [Hkv], by scores [Hkv, M]; see `split_heads`."""
    values: Floats = np.asarray(scores, dtype=np.float64)
    heads, length = values.shape
    room = np.broadcast_to(np.minimum(length if most is None else np.asarray(most), length), (heads,)).astype(np.int64)
    ranked = torch.from_numpy(-np.sort(-values, axis=1))
    order = order_heads(ranked, values.size)
    return water_fill(split_heads(order, free, room, floor_share, variant), free, 0, room)
