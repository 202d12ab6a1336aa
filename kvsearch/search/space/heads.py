"""Budgets per kv head around a calibrated table: a multiplier for each group of layers."""

from __future__ import annotations

import numpy as np

from kvsearch.arrays import Floats, Ints, Vector
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import largest_remainder, water_fill, water_level
from kvsearch.search.space.base import EXACT, BoxSpace, layer_groups, table_within

FAINT = 1e-9  # stands for a multiplier of zero, so that heads of such groups keep their proportions


class Heads(BoxSpace):
    """Multipliers of what a calibrated table gives each group of layers above the floors; 1 for all is that table.

    k_lh = floor_lh + min(lam * x_j * (base_lh - floor_lh), cap_lh - floor_lh) for the heads of group j, with lam such
    that the total is right. The sums of the groups are rounded to it by largest remainders, then the heads of each
    group to its sum. A head that the table has at its floor stays there unless all others of its group do or are full:
    a group with nothing above its floors has x_j = 0 in the table, and x_j entries for every head else.

    Args:
        base: the calibrated budgets, int64 [L, Hkv]; their sum is the total.
        floors: least entries per head, int64 [L, Hkv].
        caps: most entries per head, int64 [L, Hkv]; None: a head may take all that is above the floors.
        size: layers per group; the last group may have fewer.

    Raises:
        UsageError: the table is outside its bounds, or all at its floors, or one group has all layers.
    """

    def __init__(self, base: Ints, floors: Ints, caps: Ints | None = None, size: int = 1) -> None:
        table, low, high = table_within(base, floors, caps)
        shape: tuple[int, int] = low.shape
        self.total, self._floors, self._room, self._free = int(table.sum()), low, high - low, table - low
        self._above = int(self._free.sum())
        if not self._above:
            raise UsageError("the calibrated budgets are all at their floor: nothing is left to multiply")
        self._group = layer_groups(shape[0], size)
        self._members = [np.flatnonzero(self._group == group) for group in np.unique(self._group)]
        self._begin = np.array([float(self._free[rows].any()) for rows in self._members])
        for rows in self._members:
            self._free[rows] += not self._free[rows].any()
        largest = np.array([self._largest(rows) for rows in self._members])
        super().__init__(shape, np.zeros(len(largest)), largest)

    @property
    def start(self) -> Vector:
        """The calibrated table."""
        return self._begin.copy()

    def _largest(self, rows: Ints) -> float:
        """Return the multiplier at which a group is full, or has everything."""
        free, room = self._free[rows], self._room[rows]
        some = free > 0
        most = water_level(free[some], min(self._above, int(room[some].sum())), 0, room[some])
        return float((most / free[some]).max()) or 1.0  # one without room has no effect

    def _literal(self, x: Vector) -> Floats:
        """Return the entries above the floors that a point says, [L, Hkv], whatever they sum to."""
        said: Floats = np.minimum(x[self._group][:, None] * self._free, self._room)
        return said

    def _filled(self, x: Vector) -> Floats:
        """Return the entries above the floors with the right sum, [L, Hkv]."""
        weights = np.maximum(x, FAINT)[self._group][:, None] * self._free
        return water_level(weights, self._above, 0, self._room)

    def _project(self, x: Vector) -> Vector:
        if abs(float(self._literal(x).sum()) - self._above) <= EXACT * self.total:
            return x
        return self._clip(self._levels(self._filled(x), x))

    def _levels(self, above: Floats, otherwise: Vector) -> Vector:
        """The multiplier of each group, [d], that gives its heads `above` entries; heads that are full do not tell."""
        ratio = np.divide(above, self._free, out=np.full(above.shape, -1.0), where=self._free > 0)
        levels = np.array([ratio[rows].max() for rows in self._members])
        found: Vector = np.where(levels < 0, otherwise, levels)
        return found

    def _table(self, x: Vector) -> Ints:
        filled = self._filled(x)
        sums = np.array([filled[rows].sum() for rows in self._members])
        room = np.array([self._room[rows].sum() for rows in self._members])
        table = self._floors.copy()
        for rows, kept in zip(self._members, largest_remainder(sums, self._above, 0, room), strict=True):
            table[rows] += water_fill(self._free[rows], int(kept), 0, self._room[rows])
        return table

    def _point_of(self, table: Ints) -> Vector:
        """Return the multipliers that give the groups their sums in `table`."""
        above = np.zeros(self.shape)
        for rows in self._members:
            room = self._room[rows]
            wanted = int(np.clip((table - self._floors)[rows].sum(), 0, room.sum()))
            above[rows] = water_level(self._free[rows], wanted, 0, room)
        return self._levels(above, np.ones(self.dimension))
