"""Budgets per kv head around calibrated tables: multipliers of groups of layers, or the directions they differ in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvsearch.core.arrays import Floats, Ints, Vector
from kvsearch.core.errors import UsageError
from kvsearch.plan.rounding import largest_remainder, water_fill, water_level
from kvsearch.search.space.base import EXACT, Space, layer_groups

LEAST = 0.5  # entries: what a head without free entries counts as in a logarithm
SMALL = 1e-6  # singular values below this are rounding; a table that differs by one entry in a million has more
FAINT = 1e-9  # stands for a multiplier of zero, so that heads of such groups keep their proportions


class Heads(Space):
    """Multipliers of what a calibrated table gives each group of layers above the floors; 1 for all is that table.

    k_lh = floor_lh + min(lam * x_j * (base_lh - floor_lh), cap_lh - floor_lh) for the heads of group j, with lam such
    that the total is right. The sums of the groups are rounded to it by largest remainders, then the heads of each
    group to its sum. A head that the table has at its floor stays there unless all others of its group do or are full:
    a group with nothing above its floors has x_j = 0 in the table, and x_j entries for every head else.

    Args:
        base: the calibrated budgets, int64 [L, Hkv]; their sum is the total.
        floors: least entries per head, int64 [L, Hkv].
        caps: most entries per head, int64 [L, Hkv].
        size: layers per group; the last group may have fewer.

    Raises:
        UsageError: one group has all layers.
    """

    def __init__(self, base: Ints, floors: Ints, caps: Ints, size: int = 1) -> None:
        self.total = int(base.sum())
        self._floors = floors
        self._room = caps - floors
        self._free = base - floors
        self._above = int(self._free.sum())
        self._group = layer_groups(len(base), size)
        self._members = [np.flatnonzero(self._group == group) for group in np.unique(self._group)]
        for rows in self._members:
            self._free[rows] += not self._free[rows].any()
        largest = []  # multipliers at which groups are full, or have everything
        for rows in self._members:
            free = self._free[rows]
            room = self._room[rows]
            some = free > 0
            most = water_level(free[some], min(self._above, int(room[some].sum())), 0, room[some])
            largest.append(float((most / free[some]).max()) or 1.0)  # one without room has no effect
        super().__init__(base.shape, np.zeros(len(largest)), np.array(largest))

    def _filled(self, x: Vector) -> Floats:
        """Return the entries above the floors with the right sum, [L, Hkv]."""
        weights = np.maximum(x, FAINT)[self._group][:, None] * self._free
        return water_level(weights, self._above, 0, self._room)

    def _project(self, x: Vector) -> Vector:
        literal = np.minimum(x[self._group][:, None] * self._free, self._room)  # whatever they sum to
        if abs(float(literal.sum()) - self._above) <= EXACT * self.total:
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


class Basis(Space):
    """Budgets per kv head, base times directions: k = floor + lam * (base - floor) * exp(sum_k x_k * d_k).

    lam is such that the total is right; caps bind as in water-filling, and the rest is rounded to the exact total by
    largest remainders. x = 0 is the table itself. Every point is a table of its own, so projecting only clips.

    Args:
        base: budgets to start from, int64 [L, Hkv]; their sum is the total.
        directions: d_k in units of the logarithm of a budget, float64 [d, L, Hkv], see `basis_from_tables`.
        floors: least entries per head, int64 [L, Hkv].
        caps: most entries per head, int64 [L, Hkv].
        reach: bound of every |x_k|.
    """

    def __init__(self, base: Ints, directions: Floats, floors: Ints, caps: Ints, reach: float = 3.0) -> None:
        self._floors = floors
        self._room = caps - floors
        self._free = (base - floors).astype(np.float64)
        self._above = int(self._free.sum())
        self._directions = directions
        bound = np.full(len(directions), reach)
        super().__init__(base.shape, -bound, bound)

    def _table(self, x: Vector) -> Ints:
        logs = np.tensordot(x, self._directions, 1)
        weights = self._free * np.exp(np.minimum(logs - logs[self._free > 0].max(), 0.0))
        shares = water_level(weights, self._above, 0, self._room)
        return self._floors + largest_remainder(shares, self._above, 0, self._room)

    def _point_of(self, table: Ints) -> Vector:
        """Least squares of the logarithms; a head counts by its budget, as an entry more or less matters to small ones.

        Heads that the base has at their floor cannot move, and do not count.
        """
        known = self._free > 0
        wanted = np.maximum((table - self._floors)[known], LEAST)
        ratio = np.log(wanted / self._free[known])
        columns = np.vstack([self._directions[:, known], np.ones(int(known.sum()))]).T  # the last one is log lam
        found, *_ = np.linalg.lstsq(columns * wanted[:, None], ratio * wanted, rcond=None)
        point: Vector = found[:-1]
        return point


def basis_from_tables(tables: Sequence[Ints], floors: Ints | int) -> Floats:
    """Return the directions [d, L, Hkv] in which tables differ from uniform budgets, the main one first.

    The logarithms of what each table has above the floors, without their mean over the heads (a common factor, which
    a total takes away), are decomposed into singular vectors. Nothing is subtracted between the tables: their origin
    is uniform. So all of them, and uniform, are points of the `Basis` of any one of them. A direction has a root mean
    square of 1 over the heads: x_k = 1 changes budgets by a factor of e, typically. Its largest component is positive.

    Args:
        tables: one or more, each int64 [L, Hkv]; totals may differ. A head without free entries counts as half of one.
        floors: least entries per head, those of the `Basis`, int64 [L, Hkv].

    Raises:
        UsageError: all tables are uniform.
    """
    free = np.array(tables) - floors
    logs = np.log(np.maximum(free, LEAST)).reshape(len(tables), -1)
    logs -= logs.mean(axis=1, keepdims=True)
    _, sizes, vectors = np.linalg.svd(logs, full_matrices=False)
    main = vectors[sizes > SMALL * max(float(sizes[0]), 1.0)]
    if not len(main):
        raise UsageError("all tables are uniform above the floors: they name no direction to search in")
    largest = main[np.arange(len(main)), np.abs(main).argmax(axis=1)]
    directions: Floats = main * np.sign(largest)[:, None] * math.sqrt(main.shape[1])
    return directions.reshape(-1, *free.shape[1:])
