"""The Space seam: vectors that an optimiser can vary, and the tables of budgets they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvsearch.arrays import Ints, Vector
from kvsearch.budgets.bounds import check_bounds
from kvsearch.errors import UsageError

Rows = slice | Sequence[int]  # layers of a table

EXACT = 1e-9  # relative; sums that are nearer to the total than that are on it


class Space(ABC):
    """Which tables of budgets [L, Hkv] can be found, and by which points [d].

    Many points stand for one table: bounds clip them, the total scales them, and budgets are whole. `project` moves a
    point to where its table is, before rounding: what an optimiser should be told, so that it learns where it has been.
    It is not moved to the rounded table: between whole budgets the value is a step, and told points that coincide would
    hide from the optimiser which way it went.
    """

    @property
    def dimension(self) -> int:
        """Coordinates of a point, d."""
        return len(self.lower)

    @property
    def categories(self) -> Ints:
        """How many choices each coordinate has that stands for one of several things, [d]; 0: it is a number."""
        return np.zeros(self.dimension, dtype=np.int64)

    @property
    @abstractmethod
    def lower(self) -> Vector:
        """Least value of each coordinate, [d]."""

    @property
    @abstractmethod
    def upper(self) -> Vector:
        """Largest value of each coordinate, [d]."""

    @property
    @abstractmethod
    def start(self) -> Vector:
        """Where a search begins unless it knows better, [d] within the bounds."""

    @abstractmethod
    def budgets(self, x: Vector) -> Ints:
        """Return the table of a point [d]: int64 [L, Hkv], entries per kv head. The same for `x` and `project(x)`.

        Raises:
            UsageError: the point has another length or is not finite.
        """

    @abstractmethod
    def project(self, x: Vector) -> Vector:
        """Return where the table of a point [d] is, float64 [d] within the bounds; projecting twice changes no more.

        Raises:
            UsageError: the point has another length or is not finite.
        """

    @abstractmethod
    def point_of(self, budgets: Ints) -> Vector:
        """Return the point [d] within bounds that is nearest to a table [L, Hkv]; `budgets` undone where it can be.

        Raises:
            UsageError: the table has another shape.
        """


class BoxSpace(Space):
    """A space that checks what it is given and clips points to its bounds, so that the others need not.

    Args:
        shape: layers and kv heads of the tables.
        lower: least value of each coordinate, [d].
        upper: largest value of each coordinate, [d].
    """

    def __init__(self, shape: tuple[int, int], lower: Vector, upper: Vector) -> None:
        self.shape, self._lower, self._upper = shape, lower, upper

    @property
    def lower(self) -> Vector:
        return self._lower.copy()

    @property
    def upper(self) -> Vector:
        return self._upper.copy()

    def budgets(self, x: Vector) -> Ints:
        return self._table(self.project(x))

    def project(self, x: Vector) -> Vector:
        given = np.asarray(x, dtype=np.float64)
        if given.shape != self._lower.shape:
            raise UsageError(f"a point of this space has shape [{self.dimension}], got {list(given.shape)}")
        if not np.isfinite(given).all():
            raise UsageError(f"a point must be finite, got {given.tolist()}")
        return self._project(self._clip(given))

    def point_of(self, budgets: Ints) -> Vector:
        table = np.asarray(budgets, dtype=np.int64)
        if table.shape != self.shape:
            raise UsageError(f"a table of this space has shape {list(self.shape)}, got {list(table.shape)}")
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
        clipped: Vector = np.clip(x, self._lower, self._upper)
        return clipped


def bounds_of(total: int, floors: Ints, caps: Ints | None) -> tuple[Ints, Ints]:
    """Return checked floors and caps, int64 [L, Hkv]; no caps: a head may take everything.

    Raises:
        UsageError: they cross, have other shapes, are empty, or do not admit the total.
    """
    low = np.asarray(floors, dtype=np.int64)
    low, high = check_bounds(total, low, np.full_like(low, max(total, 0)) if caps is None else caps)
    if not total:
        raise UsageError(f"a total of {total} for {len(low)} layers leaves nothing to search")
    return low, high


def table_within(table: Ints, floors: Ints, caps: Ints | None) -> tuple[Ints, Ints, Ints]:
    """Return a table to search around, whose sum is the total, with its floors and caps, int64 [L, Hkv] each.

    Raises:
        UsageError: those of `bounds_of`, or a budget is outside its bounds.
    """
    given = np.array(table, dtype=np.int64)
    low, high = bounds_of(int(given.sum()), floors, caps)
    if given.shape != low.shape:
        raise UsageError(f"a table of budgets must have the shape of its floors, {list(low.shape)}")
    wrong = np.argwhere((given < low) | (given > high))
    if wrong.size:
        at = tuple(wrong[0].tolist())
        raise UsageError(
            f"head {list(at)} has {given[at]} entries, outside [{low[at]}, {high[at]}]: complete the table first"
        )
    return given, low, high


def rows_of(rows: Rows, layers: int) -> Ints:
    """Return the layers of a group, ascending, int64 [n].

    Raises:
        UsageError: there are none, or some are not among `layers`, or given twice.
    """
    given = np.arange(layers)[rows] if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)
    found = np.unique(given)
    if not found.size or found.size != len(given) or found[0] < 0 or found[-1] >= layers:
        raise UsageError(f"a group needs different layers from 0 to {layers - 1}, got {given.tolist()}")
    return found


def layer_groups(layers: int, size: int) -> Ints:
    """Return the group of each layer, [L]: `size` consecutive layers from the bottom up; the last may have fewer.

    Raises:
        UsageError: the size is below 1, or one group has all layers, which leaves nothing to search under a total.
    """
    if size < 1:
        raise UsageError(f"a group needs 1 layer or more, got {size}")
    if size >= layers:
        raise UsageError(f"one group of {size} has all {layers} layers: under a total nothing is left to search")
    return np.arange(layers) // size
