"""Budgets per kv head in few dimensions: the directions in which calibrated tables differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.arrays import Floats, Ints, Vector
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import largest_remainder, water_level
from kvsearch.search.space.base import BoxSpace, table_within

LEAST = 0.5  # entries: what a head without free entries counts as in a logarithm
FAINT = 1e-6  # singular values below this are rounding; a table that differs by one entry in a million has more


class Basis(BoxSpace):
    """Budgets per kv head, base times directions: k = floor + lam * (base - floor) * exp(sum_k x_k * d_k).

    lam is such that the total is right; caps bind as in water-filling, and the rest is rounded to the exact total by
    largest remainders. x = 0 is the table itself. Every point is a table of its own, so projecting only clips.

    Args:
        base: budgets to start from, int64 [L, Hkv]; their sum is the total.
        directions: d_k in units of the logarithm of a budget, float64 [d, L, Hkv], see `basis_from_tables`.
        floors: least entries per head, int64 [L, Hkv].
        caps: most entries per head, int64 [L, Hkv]; None: a head may take all that is above the floors.
        reach: bound of every |x_k|.

    Raises:
        UsageError: the table is outside its bounds, or all at its floors; directions or reach are unusable.
    """

    def __init__(
        self,
        base: Ints,
        directions: Floats,
        floors: Ints,
        caps: Ints | None = None,
        reach: float = 3.0,
    ) -> None:
        table, low, high = table_within(base, floors, caps)
        shape: tuple[int, int] = low.shape
        self.total, self._floors, self._room = int(table.sum()), low, high - low
        self._free = (table - low).astype(np.float64)
        self._above = self.total - int(low.sum())
        if not self._above:
            raise UsageError("the base budgets are all at their floor: nothing is left to multiply")
        if not 0 < reach < math.inf:
            raise UsageError(f"reach must be finite and above 0, got {reach}")
        self._directions = _directions(directions, shape)
        bound = np.full(len(self._directions), float(reach))
        super().__init__(shape, -bound, bound)

    @property
    def start(self) -> Vector:
        """The base table."""
        return np.zeros(self.dimension)

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


def basis_from_tables(tables: Sequence[Ints], floors: ArrayLike = 0, most: int | None = None) -> Floats:
    """Return the directions [d, L, Hkv] in which tables differ from uniform budgets, the main one first.

    The logarithms of what each table has above the floors, without their mean over the heads (a common factor, which
    a total takes away), are decomposed into singular vectors. Nothing is subtracted between the tables: their origin
    is uniform. So all of them, and uniform, are points of the `Basis` of any one of them. A direction has a root mean
    square of 1 over the heads: x_k = 1 changes budgets by a factor of e, typically. Its largest component is positive.

    Args:
        tables: one or more, each int64 [L, Hkv]; totals may differ. A head without free entries counts as half of one.
        floors: least entries per head, those of the `Basis`; broadcast to [L, Hkv].
        most: directions to keep; None: all, at most one per table.

    Raises:
        UsageError: the shapes differ, a budget is below its floor, or all tables are uniform.
    """
    if most is not None and most < 1:
        raise UsageError(f"a basis needs 1 direction or more, got {most}")
    if len({np.shape(table) for table in tables}) != 1 or np.ndim(tables[0]) != 2:
        raise UsageError("a basis needs one table or more, all [layers, kv heads] of one shape")
    free = np.array(tables, dtype=np.int64) - np.asarray(floors, dtype=np.int64)
    if free.min() < 0:
        raise UsageError("a basis needs tables that are nowhere below the floors: complete them first")
    logs = np.log(np.maximum(free, LEAST)).reshape(len(tables), -1)
    logs -= logs.mean(axis=1, keepdims=True)
    _, sizes, vectors = np.linalg.svd(logs, full_matrices=False)
    kept = vectors[sizes > FAINT * max(float(sizes[0]), 1.0)][:most]
    if not len(kept):
        raise UsageError("all tables are uniform above the floors: they name no direction to search in")
    largest = kept[np.arange(len(kept)), np.abs(kept).argmax(axis=1)]
    directions: Floats = kept * np.sign(largest)[:, None] * math.sqrt(kept.shape[1])
    return directions.reshape(-1, *free.shape[1:])


def _directions(directions: Floats, shape: tuple[int, int]) -> Floats:
    given = np.array(directions, dtype=np.float64)
    if given.ndim != 3 or not len(given) or given.shape[1:] != shape:
        raise UsageError(f"directions must be [d, {shape[0]}, {shape[1]}], got shape {list(given.shape)}")
    if not np.isfinite(given).all():
        raise UsageError("directions must be finite")
    return given
