"""Budgets that are equal for the heads of a layer: of one group of layers after the other, or of all layers."""

from __future__ import annotations

import math

import numpy as np

from kvsearch.core.arrays import Floats, Ints, Vector
from kvsearch.plan.rounding import largest_remainder, water_fill, water_level
from kvsearch.plan.size import GUARD
from kvsearch.search.space.base import EXACT, Space


class Parity(Space):
    """The layers of a group as in EvolKV (arXiv 2509.08315, Algorithm 1): x_i = k_i / c, all other layers as they are.

    k_i = round(x_i * c), halves up, the same for all heads of a layer. There is no total: the fitness rewards staying
    near the budget, and the result is completed to it at the end. The paper says nothing of bounds. Here k_i is at
    least its floor, and at most n_g * c for n_g layers, all that the group has on average.

    Args:
        table: budgets of all layers, the best so far, int64 [L, Hkv].
        rows: the layers of the group, [n_g].
        budget: c, entries per kv head.
        floors: least entries per head, int64 [L, Hkv]: window, sinks and one more.
    """

    def __init__(self, table: Ints, rows: Ints, budget: int, floors: Ints) -> None:
        self._rest = table
        self._rows = rows
        self.budget = budget
        least = floors[rows].max(axis=1)
        super().__init__(table.shape, least / budget, np.full(len(rows), float(len(rows))))

    def _table(self, x: Vector) -> Ints:
        table = self._rest.copy()
        table[self._rows] = np.floor(x * self.budget + 0.5 + GUARD).astype(np.int64)[:, None]
        return table

    def _point_of(self, table: Ints) -> Vector:
        point: Vector = table[self._rows].mean(axis=1) / self.budget
        return point


class Group(Space):
    """The layers of a group under a total: x_i = k_i / c, and the other layers make room.

    The layers of the group get what the point says, rounded by largest remainders to the nearest whole sum. The others
    share the rest in proportion to their budgets in `table`, within their bounds. Where they cannot, the group is
    water-filled to the nearest sum that they can. The heads of a layer of the group get the same, those of other layers
    keep their proportions.

    Args:
        table: budgets of all layers, the best so far, int64 [L, Hkv]; their sum is the total, their average is c.
        rows: the layers of the group, some of them, [n_g].
        floors: least entries per head, int64 [L, Hkv].
        caps: most entries per head, int64 [L, Hkv].
    """

    def __init__(self, table: Ints, rows: Ints, floors: Ints, caps: Ints) -> None:
        self._rest = table
        self._rows = rows
        self._others = np.setdiff1d(np.arange(len(table)), rows)
        self.total = int(table.sum())
        self.average = float(table.mean())
        self._least = floors[rows].max(axis=1)
        self._most = caps[rows].min(axis=1)
        self._low = floors[self._others]
        self._high = caps[self._others]
        heads = table.shape[1]  # those of the group are equal, so its sums are in entries per head
        self._fewest = max(int(self._least.sum()), -((int(self._high.sum()) - self.total) // heads))
        self._fullest = min(int(self._most.sum()), (self.total - int(self._low.sum())) // heads)
        alone = self._fullest - (self._least.sum() - self._least)  # while the rest of the group is at its floor
        super().__init__(table.shape, self._least / self.average, np.minimum(self._most, alone) / self.average)

    def _project(self, x: Vector) -> Vector:
        wanted = float(x.sum()) * self.average
        slack = EXACT * self.total
        if self._fewest - slack <= wanted <= self._fullest + slack:
            return x
        nearest = self._fewest if wanted < self._fewest else self._fullest
        return self._clip(water_level(x, nearest, self._least, self._most) / self.average)

    def _table(self, x: Vector) -> Ints:
        shares = x * self.average
        wanted = min(max(math.floor(shares.sum() + 0.5 + GUARD), self._fewest), self._fullest)
        table = self._rest.copy()
        table[self._rows] = largest_remainder(shares, wanted, self._least, self._most)[:, None]
        left = self.total - wanted * self.shape[1]
        table[self._others] = water_fill(self._rest[self._others], left, self._low, self._high)
        return table

    def _point_of(self, table: Ints) -> Vector:
        point: Vector = table[self._rows].mean(axis=1) / self.average
        return point


class Layers(Space):
    """One budget for each layer, equal for its heads: x_l = k_l / c, where c is the average, total / (L * Hkv).

    Points are water-filled onto the simplex of tables with that total: k_l = clamp(lam * x_l * c, floor, cap), with lam
    such that the sum is right, then rounded to it by largest remainders. The highest floor and the lowest cap of a
    layer's heads hold for all of them.

    Args:
        total: entries of all layers and heads together.
        floors: least entries per head, int64 [L, Hkv]: what the policy protects, and one more.
        caps: most entries per head, int64 [L, Hkv].
    """

    def __init__(self, total: int, floors: Ints, caps: Ints) -> None:
        self.total = total
        self.average = total / floors.size
        floor = floors.max(axis=1)
        cap = caps.min(axis=1)
        heads = floors.shape[1]
        alone = floor + (total - heads * int(floor.sum())) / heads  # of a layer while all others are at their floor
        super().__init__(floors.shape, floor / self.average, np.minimum(cap, alone) / self.average)
        self._floors = floor[:, None]
        self._caps = cap[:, None]

    def _shares(self, x: Vector) -> Floats:
        """Return the entries per head that a point says, [L, Hkv], whatever they sum to."""
        return np.broadcast_to((x * self.average)[:, None], self.shape)

    def _project(self, x: Vector) -> Vector:
        if abs(self.shape[1] * float(x.sum()) * self.average - self.total) <= EXACT * self.total:
            return x
        filled = water_level(self._shares(x), self.total, self._floors, self._caps)[:, 0]
        return self._clip(filled / self.average)

    def _table(self, x: Vector) -> Ints:
        return largest_remainder(self._shares(x), self.total, self._floors, self._caps)

    def _point_of(self, table: Ints) -> Vector:
        """Return the average of each layer."""
        point: Vector = table.sum(axis=1) / (self.shape[1] * self.average)
        return point
