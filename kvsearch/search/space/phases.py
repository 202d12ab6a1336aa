"""Budgets of several phases: the points of their spaces, and their tables, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsearch.arrays import Ints, Vector
from kvsearch.errors import UsageError
from kvsearch.search.space.base import Space


class Phases(Space):
    """Spaces side by side: a point is their points one after the other, a table their tables one below the other.

    Every space keeps its own total. A table [L, Hkv] in place of a space stays as it is.

    Args:
        parts: from the top of the table to its end; at least one of them is a space.

    Raises:
        UsageError: no part is a space.
    """

    def __init__(self, parts: Sequence[Space | Ints]) -> None:
        self.parts = tuple(parts)
        self._spaces = [part for part in self.parts if isinstance(part, Space)]
        if not self._spaces:
            raise UsageError("all parts of the table are fixed: nothing is left to search")
        self._ends = np.cumsum([space.dimension for space in self._spaces])[:-1].tolist()

    @property
    def lower(self) -> Vector:
        return np.concatenate([space.lower for space in self._spaces])

    @property
    def upper(self) -> Vector:
        return np.concatenate([space.upper for space in self._spaces])

    @property
    def start(self) -> Vector:
        return np.concatenate([space.start for space in self._spaces])

    def budgets(self, x: Vector) -> Ints:
        points = iter(self._split(x))
        return np.concatenate([part.budgets(next(points)) if isinstance(part, Space) else part for part in self.parts])

    def project(self, x: Vector) -> Vector:
        return np.concatenate([space.project(point) for space, point in zip(self._spaces, self._split(x), strict=True)])

    def point_of(self, budgets: Ints) -> Vector:
        table = np.asarray(budgets, dtype=np.int64)
        rows = [len(part.budgets(part.start)) if isinstance(part, Space) else len(part) for part in self.parts]
        if table.ndim != 2 or len(table) != sum(rows):
            raise UsageError(f"a table of this space has {sum(rows)} rows, got shape {list(table.shape)}")
        tables = np.split(table, np.cumsum(rows)[:-1].tolist())
        pairs = zip(self.parts, tables, strict=True)
        return np.concatenate([part.point_of(some) for part, some in pairs if isinstance(part, Space)])

    def _split(self, x: Vector) -> list[Vector]:
        given = np.asarray(x, dtype=np.float64)
        if given.shape != (self.dimension,):
            raise UsageError(f"a point of this space has shape [{self.dimension}], got {list(given.shape)}")
        return np.split(given, self._ends)
