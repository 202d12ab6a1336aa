"""The stages of a search: which part of the budgets is varied, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.evaluation.names import PYRAMID, UNIFORM
from kvsearch.plan import Phase
from kvsearch.plan.rounding import water_fill
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.spaces import Group, Heads, Joint, Layers, Parity, Phases, Space

UNMEASURED = (UNIFORM, PYRAMID)  # start plans that need no measurement


@dataclass(frozen=True, eq=False)
class BudgetBounds:
    """Constraints on every candidate: `budget` entries per kv head on average in each phase, and bounds for each head.

    A candidate of several phases has the layers of the first, then of the next: [phases * L, Hkv]. Where a layer may
    have one of several policies (`choices`), it has the layers under the first policy, then under the next.
    """

    budget: int
    floors: Ints
    caps: Ints
    phases: tuple[Phase, ...] = ("prefill",)
    choices: int = 1

    @property
    def layers(self) -> int:
        return len(self.floors) // len(self.phases) // self.choices

    @property
    def total(self) -> int:
        """Entries of all layers and heads in one phase."""
        return self.budget * self.layers * int(self.floors.shape[1])

    @property
    def parts(self) -> list[slice]:
        """The rows of each phase."""
        size = self.choices * self.layers
        return [slice(first, first + size) for first in range(0, len(self.floors), size)]

    def complete(self, table: Ints) -> Ints:
        """Scale budgets to the total (section 3.2), at another budget c than theirs too (section 4.2.1).

        EvolKV's rule is b_i = ceil(k_i * T / A), where A is the sum of all k_i and T = c * L the total wanted. For L
        layers that is up to L - 1 entries too many: for T = 240 [101, 50, 30, 20] becomes [121, 60, 36, 24], which is
        241. Here the same shares are water-filled between bounds, which the paper does not have, and rounded by largest
        remainders, so that the sum is T: [120, 60, 36, 24]. Each phase has its own T, and layers keep their policies.
        """
        # A layer has entries under one of its policies; bounds of the others are zero.
        used = table.any(axis=1, keepdims=True) if self.choices > 1 else np.ones_like(table)
        low = self.floors * used
        high = self.caps * used
        filled = [water_fill(table[part], self.total, low[part], high[part]) for part in self.parts]
        return np.concatenate(filled)


@dataclass(frozen=True, eq=False)
class SearchStage:
    """One optimisation run of a search, `number` of `count`.

    The optimiser varies the `rows` of a table of budgets; the tables `inject` join its first generation.
    """

    name: str
    number: int
    count: int
    space: Space
    rows: slice
    inject: list[Ints] = field(default_factory=list)


def make_stages(
    settings: EvolveSettings, bounds: BudgetBounds, starts: Mapping[str, Ints], current: Callable[[], Ints]
) -> Iterator[SearchStage]:
    """Yield the stages of a search, each built when it begins; `current` returns the best table so far.

    Raises:
        UsageError: the spaces "heads" and "joint" without start plans, and what spaces refuse.
    """
    if settings.space == "groups":
        groups = split_into_groups(bounds.layers, settings.group_size)
        count = len(bounds.parts) * len(groups)
        for phase, part in zip(bounds.phases, bounds.parts, strict=True):
            for rows in groups:
                name = f"layers {rows.start}-{rows.stop - 1}" if rows.stop - rows.start > 1 else f"layer {rows.start}"
                number = part.start // bounds.layers * len(groups) + groups.index(rows) + 1
                table_rows = slice(part.start + rows.start, part.start + rows.stop)
                prefix = f"{phase}, " if len(bounds.parts) > 1 else ""
                space = _make_group_space(settings, bounds, current(), part, rows)
                yield SearchStage(prefix + name, number, count, space, table_rows)
        return
    tables = list(starts.values())
    measured_starts = [table for name, table in starts.items() if name not in UNMEASURED]
    if settings.space != "layers" and not measured_starts:
        raise UsageError(f"space {settings.space} is made of start plans: give some with --start")
    if settings.space == "joint":  # the best of them first: what heads get is multiplied from there
        best = current()
        measured_starts = [best, *(table for table in measured_starts if not np.array_equal(table, best))]
    spaces = [_make_layers_space(settings, bounds, measured_starts, part) for part in bounds.parts]
    space_of_all = spaces[0] if len(spaces) == 1 else Phases(spaces)
    yield SearchStage(settings.space, 1, 1, space_of_all, slice(0, len(bounds.floors)), tables)


def _make_group_space(settings: EvolveSettings, bounds: BudgetBounds, table: Ints, part: slice, rows: slice) -> Space:
    """Make the space of one group of layers in one phase; other phases keep the budgets of `table`."""
    members = np.arange(rows.start, rows.stop)
    floors = bounds.floors[part]
    space: Space
    if settings.parity:
        space = Parity(table[part], members, bounds.budget, floors)
    elif len(members) == bounds.layers:
        space = Layers(bounds.total, floors, bounds.caps[part])
    else:
        space = Group(table[part], members, floors, bounds.caps[part])
    if len(bounds.parts) == 1:
        return space
    return Phases([space if other == part else table[other] for other in bounds.parts])


def _make_layers_space(settings: EvolveSettings, bounds: BudgetBounds, starts: Sequence[Ints], part: slice) -> Space:
    """Make the space of all layers of one phase; `starts` are the start plans besides the uniform and pyramid ones."""
    floors = bounds.floors[part]
    caps = bounds.caps[part]
    if settings.space == "layers":
        return Layers(bounds.total, floors, caps)
    if settings.space == "joint":
        others = [table[part] for table in starts[1:]]
        return Joint([starts[0][part], *others], floors, caps, bounds.choices, settings.group_size)
    return Heads(starts[0][part], floors, caps, settings.group_size)


def split_into_groups(layers: int, size: int) -> list[slice]:
    """List groups of `size` consecutive layers from the bottom up; the last may be smaller."""
    return [slice(first, min(first + size, layers)) for first in range(0, layers, size)]
