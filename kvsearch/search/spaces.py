"""Search spaces: the vectors that an optimiser varies, and the tables of budgets they encode.

Budgets are equal for the heads of a layer, of one group of layers after the other or of all layers; or there are
multipliers of what the heads of each group of layers get around a table, with a policy for every layer, or not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvsearch.core.arrays import Floats, Ints, Vector
from kvsearch.core.errors import UsageError
from kvsearch.plan.rounding import largest_remainder, water_fill, water_level
from kvsearch.plan.size import GUARD

SUM_TOLERANCE = 1e-9  # relative; sums that are nearer to the total than that are on it


class Space(ABC):
    """Encodes tables of budgets [L, Hkv] as points [d] in a box.

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
        """Number of coordinates of a point, d."""
        return len(self.lower)

    @property
    def categories(self) -> Ints:
        """Number of choices of each categorical coordinate, [d] int64; 0 for a continuous one."""
        return np.zeros(self.dimension, dtype=np.int64)

    def make_table(self, x: Vector) -> Ints:
        """Decode a point [d] to budgets, int64 [L, Hkv], entries per kv head; equal for `x` and `project(x)`."""
        return self._make_table(self.project(x))

    def project(self, x: Vector) -> Vector:
        """Move a point [d] onto the feasible set (bounds and total), float64 [d]; idempotent."""
        return self._project(self._clip(x))

    def find_point(self, table: Ints) -> Vector:
        """Encode budgets [L, Hkv] as the nearest point [d] within the bounds; inverts `make_table` where possible."""
        return self._clip(self._find_point(table))

    def _project(self, x: Vector) -> Vector:
        """Project a point that is within the bounds already; by default it stays where it is."""
        return x

    @abstractmethod
    def _make_table(self, x: Vector) -> Ints:
        """Decode a projected point."""

    @abstractmethod
    def _find_point(self, table: Ints) -> Vector:
        """Encode a table, without clipping to the bounds."""

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

    def _make_table(self, x: Vector) -> Ints:
        points = iter(np.split(x, self._ends))
        return np.concatenate(
            [part.make_table(next(points)) if isinstance(part, Space) else part for part in self.parts]
        )

    def _find_point(self, table: Ints) -> Vector:
        pairs = zip(self.parts, np.split(table, self._rows), strict=True)
        return np.concatenate([part.find_point(rows) for part, rows in pairs if isinstance(part, Space)])


def number_groups(layers: int, size: int) -> Ints:
    """Return the group of each layer, [L]: `size` consecutive layers from the bottom up; the last may have fewer.

    Raises:
        UsageError: one group has all layers, which leaves nothing to search under a total.
    """
    if size >= layers:
        raise UsageError(f"one group of {size} has all {layers} layers: under a total nothing is left to search")
    return np.arange(layers) // size


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

    def _make_table(self, x: Vector) -> Ints:
        table = self._rest.copy()
        table[self._rows] = np.floor(x * self.budget + 0.5 + GUARD).astype(np.int64)[:, None]
        return table

    def _find_point(self, table: Ints) -> Vector:
        point: Vector = table[self._rows].mean(axis=1) / self.budget
        return point


class Group(Space):
    """The layers of a group under a total: x_i = k_i / c, and the other layers make room.

    The layers of the group get what the point says, rounded by largest remainders to the nearest whole sum. The others
    share the rest in proportion to their budgets in `table`, within their bounds. Where they cannot, the group is
    water-filled to the nearest sum that they can. The heads of a layer of the group get the same, the heads of other
    layers keep their proportions.

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
        # A point that is on the sum stays where it is, so that projecting twice changes nothing.
        slack = SUM_TOLERANCE * self.total
        if self._fewest - slack <= wanted <= self._fullest + slack:
            return x
        # The rest of the layers cannot make room for more, nor take in what is missing.
        nearest = self._fewest if wanted < self._fewest else self._fullest
        return self._clip(water_level(x, nearest, self._least, self._most) / self.average)

    def _make_table(self, x: Vector) -> Ints:
        shares = x * self.average
        wanted = min(max(math.floor(shares.sum() + 0.5 + GUARD), self._fewest), self._fullest)
        table = self._rest.copy()
        table[self._rows] = largest_remainder(shares, wanted, self._least, self._most)[:, None]
        left = self.total - wanted * self.shape[1]
        table[self._others] = water_fill(self._rest[self._others], left, self._low, self._high)
        return table

    def _find_point(self, table: Ints) -> Vector:
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

    def _share_entries(self, x: Vector) -> Floats:
        """Return the entries per head of a point, [L, Hkv], before they are scaled to the total."""
        return np.broadcast_to((x * self.average)[:, None], self.shape)

    def _project(self, x: Vector) -> Vector:
        if abs(self.shape[1] * float(x.sum()) * self.average - self.total) <= SUM_TOLERANCE * self.total:
            return x
        filled = water_level(self._share_entries(x), self.total, self._floors, self._caps)[:, 0]
        return self._clip(filled / self.average)

    def _make_table(self, x: Vector) -> Ints:
        return largest_remainder(self._share_entries(x), self.total, self._floors, self._caps)

    def _find_point(self, table: Ints) -> Vector:
        """Return the average of each layer."""
        point: Vector = table.sum(axis=1) / (self.shape[1] * self.average)
        return point


SMALLEST_MULTIPLIER = 1e-9  # stands for a multiplier of zero, so that heads of such groups keep their proportions
LOG_BOUND = 3.0  # bound of the logarithm of a multiplier in space joint
EMPTY_GROUP_ENTRIES = (
    0.5  # entries that all layers at their floors have together: too few to change a table that is rounded
)


class Heads(Space):
    """Multipliers of a calibrated table above the floors, one for each group of layers; all 1 is the table itself.

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
        self._group = number_groups(len(base), size)
        self._members = [np.flatnonzero(self._group == group) for group in np.unique(self._group)]
        for rows in self._members:
            # A group at its floors has no shape of its own: its heads get equal parts of what comes.
            self._free[rows] += not self._free[rows].any()
        largest = []  # multipliers at which groups are full, or have everything
        for rows in self._members:
            free = self._free[rows]
            room = self._room[rows]
            has_free = free > 0
            full = water_level(free[has_free], min(self._above, int(room[has_free].sum())), 0, room[has_free])
            largest.append(float((full / free[has_free]).max()) or 1.0)  # one without room has no effect
        super().__init__(base.shape, np.zeros(len(largest)), np.array(largest))

    def _fill(self, x: Vector) -> Floats:
        """Water-fill the entries above the floors to the total, [L, Hkv]."""
        # A weight of zero would lose the proportions of its heads once all others are full.
        weights = np.maximum(x, SMALLEST_MULTIPLIER)[self._group][:, None] * self._free
        return water_level(weights, self._above, 0, self._room)

    def _project(self, x: Vector) -> Vector:
        # If the point says the total already, it is its own projection.
        literal = np.minimum(x[self._group][:, None] * self._free, self._room)  # whatever they sum to
        if abs(float(literal.sum()) - self._above) <= SUM_TOLERANCE * self.total:
            return x
        return self._clip(self._find_multipliers(self._fill(x), x))

    def _find_multipliers(self, above: Floats, otherwise: Vector) -> Vector:
        """Return the multiplier of each group, [d], that gives its heads `above` entries; full heads are ignored."""
        ratio = np.divide(above, self._free, out=np.full(above.shape, -1.0), where=self._free > 0)
        levels = np.array([ratio[rows].max() for rows in self._members])
        multipliers: Vector = np.where(levels < 0, otherwise, levels)
        return multipliers

    def _make_table(self, x: Vector) -> Ints:
        filled = self._fill(x)
        sums = np.array([filled[rows].sum() for rows in self._members])
        room = np.array([self._room[rows].sum() for rows in self._members])
        table = self._floors.copy()
        for rows, kept in zip(self._members, largest_remainder(sums, self._above, 0, room), strict=True):
            table[rows] += water_fill(self._free[rows], int(kept), 0, self._room[rows])
        return table

    def _find_point(self, table: Ints) -> Vector:
        """Return the multipliers that give the groups their sums in `table`."""
        above = np.zeros(self.shape)
        for rows in self._members:
            room = self._room[rows]
            wanted = int(np.clip((table - self._floors)[rows].sum(), 0, room.sum()))
            above[rows] = water_level(self._free[rows], wanted, 0, room)
        return self._find_multipliers(above, np.ones(self.dimension))


def decode_choices(table: Ints, choices: int) -> Ints:
    """Read the choice of each layer from a table [choices * L, Hkv], [L]: the one with entries, else the first."""
    choice_of_layer: Ints = table.reshape(choices, -1, table.shape[1]).any(axis=2).argmax(axis=0)
    return choice_of_layer


def encode_choices(budgets: Ints, chosen: Ints, choices: int) -> Ints:
    """Place budgets [L, Hkv] in a table [choices * L, Hkv], each layer under its choice, `chosen` [L]."""
    layers, heads = budgets.shape
    table = np.zeros((choices, layers, heads), dtype=np.int64)
    table[chosen, np.arange(layers)] = budgets
    return table.reshape(-1, heads)


class Joint(Space):
    """Policies of layers, and multipliers of groups of layers above the floors: k = floor + lam * exp(x_j) * free.

    A table has the layers under the first choice, then under the next, [choices * L, Hkv]; a layer has entries under
    one of them. The first L coordinates say which, the others are x_j. A layer that takes another policy keeps its
    total, with x as at the start, and its heads share it as in the first of the tables that has this policy there, or
    else as before. lam is such that the total is right; caps bind as in water-filling, and the rest is rounded to the
    exact total by largest remainders.

    The first table is the start, with x = 0, but for groups that have nothing above their floors: these have a part of
    `EMPTY_GROUP_ENTRIES` there, and begin at the lower bound, so that they can gain entries.

    Args:
        tables: start plans, each int64 [choices * L, Hkv]; the first one's sum is the total.
        floors: least entries per head of a layer that has the choice, int64 [choices * L, Hkv].
        caps: most entries per head, int64 [choices * L, Hkv].
        choices: how many policies there are.
        size: layers per multiplier; the last group may have fewer.

    Raises:
        UsageError: nothing above the floors, one group has all layers, or some policies always keep too much.
    """

    def __init__(self, tables: Sequence[Ints], floors: Ints, caps: Ints, choices: int, size: int = 1) -> None:
        self.choices = choices
        heads = floors.shape[1]
        stacked = (choices, len(floors) // choices, heads)
        self._layers = stacked[1]
        self._low = floors.reshape(stacked)
        self._high = caps.reshape(stacked)
        self._rows = np.arange(self._layers)
        self._first = decode_choices(tables[0], choices)
        least = self._low[self._first, self._rows]
        base = tables[0].reshape(stacked)[self._first, self._rows]
        self.total = int(base.sum())
        if self.total <= int(least.sum()):
            raise UsageError("the base budgets are all at their floor: nothing is left to multiply")
        least_total = int(self._low.sum(axis=2).max(axis=0).sum())
        if self.total < least_total:
            raise UsageError(
                f"a total of {self.total} is below the {least_total} entries that layers always keep under the policy "
                "that protects most: raise the budget, or give all policies the same protection"
            )
        self._group = number_groups(self._layers, size)
        groups = int(self._group.max()) + 1
        above = (base - least).sum(axis=1)
        self._least = EMPTY_GROUP_ENTRIES / max(int((above == 0).sum()), 1)
        empty = np.bincount(self._group, weights=above, minlength=groups) == 0
        self._begin = np.where(empty, -LOG_BOUND, 0.0)  # x of the first table
        self._free = self._share_entries([table.reshape(stacked) for table in tables], base)
        bound = np.concatenate([np.zeros(self._layers), np.full(groups, LOG_BOUND)])
        upper = np.concatenate([np.full(self._layers, choices - 1.0), np.full(groups, LOG_BOUND)])
        super().__init__((len(floors), heads), -bound, upper)

    @property
    def categories(self) -> Ints:
        return np.where(np.arange(self.dimension) < self._layers, self.choices, 0)

    def _share_entries(self, tables: Sequence[Ints], base: Ints) -> Floats:
        """Return entries of heads above the floors under each choice at x = 0, [C, L, Hkv]."""
        free = np.zeros((self.choices, self._layers, base.shape[1]))
        for choice in range(self.choices):
            for layer in range(self._layers):
                known = [table[choice, layer] for table in tables if table[choice, layer].any()]
                low = self._low[choice, layer]
                shape = np.maximum((known[0] if known else base[layer]) - low, 0).astype(np.float64)
                wanted = max(float(base[layer].sum() - low.sum()), self._least)
                shape = shape if shape.any() else np.ones_like(shape)
                free[choice, layer] = shape if shape.sum() == wanted else shape * wanted / shape.sum()
        return free * np.exp(-self._begin[self._group])[:, None]

    def _project(self, x: Vector) -> Vector:
        return np.concatenate([np.rint(x[: self._layers]), x[self._layers :]])

    def _make_table(self, x: Vector) -> Ints:
        chosen = x[: self._layers].astype(np.int64)
        low = self._low[chosen, self._rows]
        high = self._high[chosen, self._rows]
        # Multipliers are logarithms: half and double are equally far, and their product is what the total fixes.
        logs = x[self._layers :][self._group]
        # lam makes up for any common factor, so the largest can be 1.
        weights = self._free[chosen, self._rows] * np.exp(logs - logs.max())[:, None]
        above = self.total - int(low.sum())
        shares = water_level(weights, above, 0, high - low)
        return encode_choices(low + largest_remainder(shares, above, 0, high - low), chosen, self.choices)

    def _find_point(self, table: Ints) -> Vector:
        chosen = decode_choices(table, self.choices)
        stacked = table.reshape(self.choices, self._layers, -1)
        above = (stacked - self._low)[chosen, self._rows].sum(axis=1)
        free = self._free[chosen, self._rows].sum(axis=1)
        groups = int(self._group.max()) + 1
        # Nothing above the floors has no logarithm: it counts as a part of an entry.
        wanted = np.maximum(np.bincount(self._group, weights=above, minlength=groups), self._least)
        known = np.maximum(np.bincount(self._group, weights=free, minlength=groups), self._least)
        begun = float((free * np.exp(self._begin[self._group])).sum())
        logs = np.log(wanted / known) - math.log(float(wanted.sum()) / max(begun, EMPTY_GROUP_ENTRIES))
        return np.concatenate([chosen, logs])
