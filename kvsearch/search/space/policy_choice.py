"""A policy for every layer and multipliers of what its heads get, searched together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvsearch.core.arrays import Floats, Ints, Vector
from kvsearch.core.errors import UsageError
from kvsearch.plan.rounding import largest_remainder, water_level
from kvsearch.search.space.base import Space, layer_groups

LEAST = 0.5  # entries that all layers at their floors have together: too few to change a table that is rounded


def chosen_of(table: Ints, choices: int) -> Ints:
    """Return which choice each layer of a table [choices * L, Hkv] has, [L]: the one with entries; else the first."""
    found: Ints = table.reshape(choices, -1, table.shape[1]).any(axis=2).argmax(axis=0)
    return found


def placed(budgets: Ints, chosen: Ints, choices: int) -> Ints:
    """Return the table [choices * L, Hkv] of budgets [L, Hkv] where each layer has a choice, [L]."""
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
    `LEAST` there, and begin at the lower bound, so that they can gain entries.

    Args:
        tables: start plans, each int64 [choices * L, Hkv]; the first one's sum is the total.
        floors: least entries per head of a layer that has the choice, int64 [choices * L, Hkv].
        caps: most entries per head, int64 [choices * L, Hkv].
        choices: how many policies there are.
        size: layers per multiplier; the last group may have fewer.
        reach: bound of every |x_j|.

    Raises:
        UsageError: nothing above the floors, one group has all layers, or some policies always keep too much.
    """

    def __init__(
        self, tables: Sequence[Ints], floors: Ints, caps: Ints, choices: int, size: int = 1, reach: float = 3.0
    ) -> None:
        self.choices = choices
        heads = floors.shape[1]
        stacked = (choices, len(floors) // choices, heads)
        self._layers = stacked[1]
        self._low = floors.reshape(stacked)
        self._high = caps.reshape(stacked)
        self._rows = np.arange(self._layers)
        self._first = chosen_of(tables[0], choices)
        least = self._low[self._first, self._rows]
        base = tables[0].reshape(stacked)[self._first, self._rows]
        self.total = int(base.sum())
        if self.total <= int(least.sum()):
            raise UsageError("the base budgets are all at their floor: nothing is left to multiply")
        most = int(self._low.sum(axis=2).max(axis=0).sum())
        if self.total < most:
            raise UsageError(
                f"a total of {self.total} is below the {most} entries that layers always keep under the policy that "
                "protects most: raise the budget, or give all policies the same protection"
            )
        self._group = layer_groups(self._layers, size)
        groups = int(self._group.max()) + 1
        above = (base - least).sum(axis=1)
        self._least = LEAST / max(int((above == 0).sum()), 1)
        empty = np.bincount(self._group, weights=above, minlength=groups) == 0
        self._begin = np.where(empty, -float(reach), 0.0)  # x of the first table
        self._free = self._shares([table.reshape(stacked) for table in tables], base)
        bound = np.concatenate([np.zeros(self._layers), np.full(groups, float(reach))])
        upper = np.concatenate([np.full(self._layers, choices - 1.0), np.full(groups, float(reach))])
        super().__init__((len(floors), heads), -bound, upper)

    @property
    def categories(self) -> Ints:
        return np.where(np.arange(self.dimension) < self._layers, self.choices, 0)

    def _shares(self, tables: Sequence[Ints], base: Ints) -> Floats:
        """Return what heads get above the floors under each choice at x = 0, [C, L, Hkv]."""
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

    def _table(self, x: Vector) -> Ints:
        chosen = x[: self._layers].astype(np.int64)
        low = self._low[chosen, self._rows]
        high = self._high[chosen, self._rows]
        logs = x[self._layers :][self._group]
        weights = self._free[chosen, self._rows] * np.exp(logs - logs.max())[:, None]
        above = self.total - int(low.sum())
        shares = water_level(weights, above, 0, high - low)
        return placed(low + largest_remainder(shares, above, 0, high - low), chosen, self.choices)

    def _point_of(self, table: Ints) -> Vector:
        chosen = chosen_of(table, self.choices)
        stacked = table.reshape(self.choices, self._layers, -1)
        above = (stacked - self._low)[chosen, self._rows].sum(axis=1)
        free = self._free[chosen, self._rows].sum(axis=1)
        groups = int(self._group.max()) + 1
        sums = (np.bincount(self._group, weights=one, minlength=groups) for one in (above, free))
        wanted, known = (np.maximum(one, self._least) for one in sums)
        begun = float((free * np.exp(self._begin[self._group])).sum())
        logs = np.log(wanted / known) - math.log(float(wanted.sum()) / max(begun, LEAST))
        return np.concatenate([chosen, logs])
