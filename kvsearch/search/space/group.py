"""Budgets of the layers of one group, as EvolKV searches them: one group after the other."""

from __future__ import annotations

import math

import numpy as np

from kvsearch.arrays import Ints, Vector
from kvsearch.errors import UsageError
from kvsearch.plan.guard import GUARD
from kvsearch.plan.rounding import largest_remainder, water_fill, water_level
from kvsearch.search.space.base import EXACT, BoxSpace, Rows, rows_of, table_within


class Parity(BoxSpace):
    """The layers of a group as in EvolKV (arXiv 2509.08315, Algorithm 1): x_i = k_i / c, all other layers as they are.

    k_i = round(x_i * c), halves up, the same for all heads of a layer. There is no total: the fitness rewards staying
    near the budget, and the result is completed to it at the end. The paper says nothing of bounds. Here k_i is at
    least its floor, and at most n_g * c for n_g layers, all that the group has on average.

    Args:
        table: budgets of all layers, the best so far, int64 [L, Hkv].
        rows: the layers of the group.
        budget: c, entries per kv head.
        floors: least entries per head, int64 [L, Hkv]: window, sinks and one more.
        caps: most entries per head, int64 [L, Hkv]; None: the bound above is the only one.

    Raises:
        UsageError: the group is empty or not in the table, shapes differ, or a layer's bounds cross.
    """

    def __init__(self, table: Ints, rows: Rows, budget: int, floors: Ints, caps: Ints | None = None) -> None:
        self._rest = np.array(table, dtype=np.int64)
        shape: tuple[int, int] = self._rest.shape
        if any(np.shape(bound) != shape for bound in (floors, caps) if bound is not None):
            raise UsageError(f"floors and caps must have the shape of the table, {list(shape)}")
        self.budget, self._rows = budget, rows_of(rows, len(table))
        least = np.asarray(floors)[self._rows].max(axis=1)
        most = np.full_like(least, len(self._rows) * budget)
        if caps is not None:
            most = np.minimum(most, np.asarray(caps)[self._rows].min(axis=1))
        crossed = np.flatnonzero(least > most)
        if crossed.size:
            layer, low, high = self._rows[crossed[0]], least[crossed[0]], most[crossed[0]]
            raise UsageError(f"layer {layer} must keep {low} entries per head and may keep {high}: raise the budget")
        super().__init__(shape, least / budget, most / budget)

    @property
    def start(self) -> Vector:
        """The table as it is."""
        return self.point_of(self._rest)

    def _table(self, x: Vector) -> Ints:
        table = self._rest.copy()
        table[self._rows] = np.floor(x * self.budget + 0.5 + GUARD).astype(np.int64)[:, None]
        return table

    def _point_of(self, table: Ints) -> Vector:
        point: Vector = table[self._rows].mean(axis=1) / self.budget
        return point


class Group(BoxSpace):
    """The layers of a group under a total: x_i = k_i / c, and the other layers make room.

    The layers of the group get what the point says, rounded by largest remainders to the nearest whole sum. The others
    share the rest in proportion to their budgets in `table`, within their bounds. Where they cannot, the group is
    water-filled to the nearest sum that they can. The heads of a layer of the group get the same, those of other layers
    keep their proportions.

    Args:
        table: budgets of all layers, the best so far, int64 [L, Hkv]; their sum is the total, their average is c.
        rows: the layers of the group.
        floors: least entries per head, int64 [L, Hkv].
        caps: most entries per head, int64 [L, Hkv]; None: a layer may take all that the floors of the others leave.

    Raises:
        UsageError: the group is empty, not in the table, or the whole of it; or the bounds do not admit the total.
    """

    def __init__(self, table: Ints, rows: Rows, floors: Ints, caps: Ints | None = None) -> None:
        self._rest, low, high = table_within(table, floors, caps)
        shape: tuple[int, int] = low.shape
        self.total, self.average = int(self._rest.sum()), float(self._rest.mean())
        self._rows = rows_of(rows, shape[0])
        self._others = np.setdiff1d(np.arange(shape[0]), self._rows)
        if not self._others.size:
            raise UsageError(f"the group has all {shape[0]} layers: use the space of all layers")
        self._least, self._most = low[self._rows].max(axis=1), high[self._rows].min(axis=1)
        self._low, self._high = low[self._others], high[self._others]
        heads = shape[1]  # those of the group are equal, so its sums are in entries per head
        self._fewest = max(int(self._least.sum()), -((int(self._high.sum()) - self.total) // heads))
        self._fullest = min(int(self._most.sum()), (self.total - int(self._low.sum())) // heads)
        if (self._least > self._most).any() or self._fewest > self._fullest:
            names = ", ".join(map(str, self._rows))
            raise UsageError(
                f"layers {names} with equal heads cannot share a total of {self.total} within floors and caps"
            )
        alone = self._fullest - (self._least.sum() - self._least)  # while the rest of the group is at its floor
        super().__init__(shape, self._least / self.average, np.minimum(self._most, alone) / self.average)

    @property
    def start(self) -> Vector:
        """The table as it is."""
        return self.project(self.point_of(self._rest))

    def _project(self, x: Vector) -> Vector:
        wanted, slack = float(x.sum()) * self.average, EXACT * self.total
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
