"""PyramidKV: budgets that fall linearly from the first layer to the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsearch.budgets.allocator import Signals, check_at_least, lift_floors, share_above
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.plan.rounding import check_bounds
from kvsearch.plan.size import round_down


@dataclass(frozen=True)
class Pyramid:
    """PyramidKV (Cai et al. 2024, arXiv 2406.02069): the free budget of layer l lies on a line.

    x_l = c_max - l * (c_max - c_min) / (L - 1), c_min = floor(c / beta), c_max = 2 * c - c_min

    c is the mean free budget: entries per kv head beyond the window. If c_max exceeds the room of the first layer
    beyond its window, c_max is that room and c_min = 2 * c - c_max, so the line gets flatter. All heads of a layer get
    the same. One layer has no line: it gets c. The official code rounds the step of the line to whole entries and so
    hands out more than it was asked for, e.g. 15 % with c=96 and 32 layers; here the shares are rounded to the exact
    total. A total that does not reach the window of every head is shared equally.

    Args:
        beta: how many times the mean is of the smallest budget; 1 or more.
        window: entries per head that are kept before anything is free; floors above it hold instead.

    Examples:
        >>> floors = np.zeros((3, 2), dtype=np.int64)
        >>> Pyramid(window=4).allocate(np.zeros(0), 3 * 2 * 64, floors, floors + 1000).tolist()
        [[121, 121], [64, 64], [7, 7]]
    """

    name: ClassVar[str] = "pyramid"
    beta: float = 20.0
    window: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.beta < math.inf:
            raise UsageError(f"beta must be finite and 1 or more, got {self.beta}")
        check_at_least(0, window=self.window)

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:  # noqa: ARG002
        """Allocate `total` entries over the [L, Hkv] heads of `floors`; the signals are not read.

        Raises:
            UsageError: `total` is outside [sum of floors, sum of caps].
        """
        low, high = check_bounds(np.shape(floors), total, floors, caps)
        base = lift_floors(self.window, total, low, high)
        mean = (total - int(base.sum())) / base.size
        room = (high - base)[0].mean()
        largest = max(min(2 * mean - round_down(mean / self.beta), room), mean)
        line = np.linspace(largest, 2 * mean - largest, len(base)) if len(base) > 1 else np.array([mean])
        return share_above(np.maximum(line, 0.0)[:, None], total, base, high)
