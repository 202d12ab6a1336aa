"""Budgets of all layers jointly, equal for the heads of a layer, with an exact total."""

from __future__ import annotations

import numpy as np

from kvsearch.arrays import Floats, Ints, Vector
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import largest_remainder, water_level
from kvsearch.search.space.base import EXACT, BoxSpace, bounds_of, layer_groups


class LayerGroups(BoxSpace):
    """One budget for each group of consecutive layers: x_j = k_j / c, where c is the average, total / (L * Hkv).

    Points are water-filled onto the simplex of tables with that total: k_l = clamp(lam * x_j * c, floor, cap) for
    the layers l of group j, with lam such that the sum is right, then rounded to it by largest remainders.
    The heads and layers of a group get the same, but for the odd entries of a group of several layers, so the highest
    of their floors and the lowest of their caps hold for all of them.

    Args:
        total: entries of all layers and heads together.
        floors: least entries per head, int64 [L, Hkv]: what the policy protects, and one more.
        caps: most entries per head, int64 [L, Hkv]; None: a group may take all that the floors of the others leave.
        size: layers per group; the last group may have fewer.

    Raises:
        UsageError: the bounds do not admit the total, or one group has all layers.
    """

    def __init__(self, total: int, floors: Ints, caps: Ints | None = None, size: int = 8) -> None:
        low, high = bounds_of(total, floors, caps)
        shape: tuple[int, int] = low.shape
        self.total, self.average = total, total / low.size
        self._group = layer_groups(shape[0], size)
        self._heads = np.bincount(self._group) * shape[1]  # in each group
        self._first = np.arange(0, shape[0], size)  # layer of each group
        floor = np.maximum.reduceat(low.max(axis=1), self._first)
        cap = np.minimum.reduceat(high.min(axis=1), self._first)
        least, most = int(self._heads @ floor), int(self._heads @ cap)
        if (floor > cap).any() or not least <= total <= most:
            raise UsageError(f"equal budgets in groups of {size} layers cannot sum to {total} within floors and caps")
        alone = floor + (total - least) / self._heads  # of a group while all others are at their floor
        super().__init__(shape, floor / self.average, np.minimum(cap, alone) / self.average)
        self._floors, self._caps = floor[self._group][:, None], cap[self._group][:, None]

    @property
    def start(self) -> Vector:
        """The point nearest to uniform budgets."""
        return self.project(np.ones(self.dimension))

    def _shares(self, x: Vector) -> Floats:
        """Return the entries per head that a point says, [L, Hkv], whatever they sum to."""
        return np.broadcast_to((x * self.average)[self._group][:, None], self.shape)

    def _project(self, x: Vector) -> Vector:
        if abs(float(self._heads @ x) * self.average - self.total) <= EXACT * self.total:
            return x
        filled = water_level(self._shares(x), self.total, self._floors, self._caps)[:, 0]
        return self._clip(filled[self._first] / self.average)

    def _table(self, x: Vector) -> Ints:
        return largest_remainder(self._shares(x), self.total, self._floors, self._caps)

    def _point_of(self, table: Ints) -> Vector:
        """Return the average of each group."""
        point: Vector = np.bincount(self._group, weights=table.sum(axis=1)) / (self._heads * self.average)
        return point


class Layers(LayerGroups):
    """One budget for each layer: x_l = k_l / c. Arguments and errors are those of `LayerGroups`."""

    def __init__(self, total: int, floors: Ints, caps: Ints | None = None) -> None:
        super().__init__(total, floors, caps, size=1)
