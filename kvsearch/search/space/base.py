"""The Space seam: vectors that an optimiser can vary, and the tables of budgets they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvsearch.core.arrays import Ints, Vector
from kvsearch.core.errors import UsageError

EXACT = 1e-9  # relative; sums that are nearer to the total than that are on it


class Space(ABC):
    """Which tables of budgets [L, Hkv] can be found, and by which points [d] in a box.

    Many points stand for one table: bounds clip them, the total scales them, and budgets are whole. `project` moves a
    point to where its table is, before rounding: what an optimiser should be told, so that it learns where it has been.
    It is not moved to the rounded table: between whole budgets the value is a step, and told points that coincide would
    hide from the optimiser which way it went.

    Args:
        shape: layers and kv heads of the tables.
        lower: least value of each coordinate, [d].
        upper: largest value of each coordinate, [d].
    """

    def __init__(self, shape: tuple[int, int], lower: Vector, upper: Vector) -> None:
        self.shape = shape
        self.lower = lower
        self.upper = upper

    @property
    def dimension(self) -> int:
        """Coordinates of a point, d."""
        return len(self.lower)

    @property
    def categories(self) -> Ints:
        """How many choices each coordinate has that stands for one of several things, [d]; 0: it is a number."""
        return np.zeros(self.dimension, dtype=np.int64)

    def budgets(self, x: Vector) -> Ints:
        """Return the table of a point [d]: int64 [L, Hkv], entries per kv head. The same for `x` and `project(x)`."""
        return self._table(self.project(x))

    def project(self, x: Vector) -> Vector:
        """Return where the table of a point [d] is, float64 [d] within the bounds; projecting twice changes no more."""
        return self._project(self._clip(x))

    def point_of(self, table: Ints) -> Vector:
        """Return the point [d] within bounds that is nearest to a table [L, Hkv]; `budgets` undone where it can be."""
        return self._clip(self._point_of(table))

    def _project(self, x: Vector) -> Vector:
        """`project` of a point within the bounds; only bounds move it unless a space says otherwise."""
        return x

    @abstractmethod
    def _table(self, x: Vector) -> Ints:
        """Return the table of a projected point."""

    @abstractmethod
    def _point_of(self, table: Ints) -> Vector:
        """`point_of`, before it is clipped to the bounds."""

    def _clip(self, x: Vector) -> Vector:
        clipped: Vector = np.clip(x, self.lower, self.upper)
        return clipped


class Phases(Space):
    """Spaces side by side: a point is their points one after the other, a table their tables one below the other.

    Every space keeps its own total. A table [L, Hkv] in place of a space stays as it is.

    Args:
        parts: from the top of the table to its end; at least one of them is a space.
    """

    def __init__(self, parts: Sequence[Space | Ints]) -> None:
        self.parts = parts
        self._spaces = [part for part in parts if isinstance(part, Space)]
        self._ends = np.cumsum([space.dimension for space in self._spaces])[:-1].tolist()
        rows = [part.shape[0] for part in parts]
        self._rows = np.cumsum(rows)[:-1].tolist()
        lower = np.concatenate([space.lower for space in self._spaces])
        upper = np.concatenate([space.upper for space in self._spaces])
        super().__init__((sum(rows), parts[0].shape[1]), lower, upper)

    def _project(self, x: Vector) -> Vector:
        points = np.split(x, self._ends)
        return np.concatenate([space.project(point) for space, point in zip(self._spaces, points, strict=True)])

    def _table(self, x: Vector) -> Ints:
        points = iter(np.split(x, self._ends))
        return np.concatenate([part.budgets(next(points)) if isinstance(part, Space) else part for part in self.parts])

    def _point_of(self, table: Ints) -> Vector:
        pairs = zip(self.parts, np.split(table, self._rows), strict=True)
        return np.concatenate([part.point_of(rows) for part, rows in pairs if isinstance(part, Space)])


def layer_groups(layers: int, size: int) -> Ints:
    """Return the group of each layer, [L]: `size` consecutive layers from the bottom up; the last may have fewer.

    Raises:
        UsageError: one group has all layers, which leaves nothing to search under a total.
    """
    if size >= layers:
        raise UsageError(f"one group of {size} has all {layers} layers: under a total nothing is left to search")
    return np.arange(layers) // size
