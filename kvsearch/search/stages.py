"""The stages of a search: which part of the budgets is varied, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.plan import Phase
from kvsearch.plan.rounding import water_fill
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.spaces import Group, Heads, Joint, Layers, Parity, Phases, Space
from kvsearch.strategies.names import PYRAMID, UNIFORM

EVEN = (UNIFORM, PYRAMID)  # start plans that need no measurement


@dataclass(frozen=True, eq=False)
class Frame:
    """What all candidates keep to: `budget` entries per kv head on average in each phase, and bounds of each head.

    A candidate of several phases has the layers of the first, then those of the next: [phases * L, Hkv]. Where a layer
    may have one of several policies (`choices`), it has the layers under the first policy, then under the next.
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
        241. Here the same shares are water-filled between the bounds, of which the paper says nothing, and rounded by
        largest remainders, so that the sum is T: [120, 60, 36, 24]. Each phase has its own T, and layers keep their
        policies.
        """
        used = table.any(axis=1, keepdims=True) if self.choices > 1 else np.ones_like(table)
        low = self.floors * used
        high = self.caps * used
        filled = [water_fill(table[part], self.total, low[part], high[part]) for part in self.parts]
        return np.concatenate(filled)


@dataclass(frozen=True, eq=False)
class SearchStage:
    """One optimisation, `number` of `count`.

    `rows` are what is varied of a table, `inject` what the optimiser is told first.
    """

    name: str
    number: int
    count: int
    space: Space
    rows: slice
    inject: list[Ints] = field(default_factory=list)


def stages_of(
    settings: EvolveSettings, frame: Frame, starts: Mapping[str, Ints], current: Callable[[], Ints]
) -> Iterator[SearchStage]:
    """Yield the stages of a search, each made when it begins; `current` is the best table then, where joint begins.

    Raises:
        UsageError: the spaces "heads" and "joint" without start plans, and what spaces refuse.
    """
    if settings.space == "groups":
        groups = groups_of(frame.layers, settings.group_size)
        count = len(frame.parts) * len(groups)
        for phase, part in zip(frame.phases, frame.parts, strict=True):
            for rows in groups:
                name = f"layers {rows.start}-{rows.stop - 1}" if rows.stop - rows.start > 1 else f"layer {rows.start}"
                number = part.start // frame.layers * len(groups) + groups.index(rows) + 1
                where = slice(part.start + rows.start, part.start + rows.stop)
                of_phase = f"{phase}, " if len(frame.parts) > 1 else ""
                space = _of_group(settings, frame, current(), part, rows)
                yield SearchStage(of_phase + name, number, count, space, where)
        return
    tables = list(starts.values())
    given = [table for name, table in starts.items() if name not in EVEN]
    if settings.space != "layers" and not given:
        raise UsageError(f"space {settings.space} is made of start plans: give some with --start")
    if settings.space == "joint":  # the best of them first: what heads get is multiplied from there
        best = current()
        given = [best, *(table for table in given if not np.array_equal(table, best))]
    spaces = [_of_layers(settings, frame, given, part) for part in frame.parts]
    whole = spaces[0] if len(spaces) == 1 else Phases(spaces)
    yield SearchStage(settings.space, 1, 1, whole, slice(0, len(frame.floors)), tables)


def _of_group(settings: EvolveSettings, frame: Frame, table: Ints, part: slice, rows: slice) -> Space:
    """Return the space of a group of layers of one phase; the other phases stay as the best table has them."""
    members = np.arange(rows.start, rows.stop)
    floors = frame.floors[part]
    space: Space
    if settings.parity:
        space = Parity(table[part], members, frame.budget, floors)
    elif len(members) == frame.layers:
        space = Layers(frame.total, floors, frame.caps[part])
    else:
        space = Group(table[part], members, floors, frame.caps[part])
    if len(frame.parts) == 1:
        return space
    return Phases([space if other == part else table[other] for other in frame.parts])


def _of_layers(settings: EvolveSettings, frame: Frame, given: Sequence[Ints], part: slice) -> Space:
    """Return the space of all layers of one phase; start plans that were `given` come after the even ones."""
    floors = frame.floors[part]
    caps = frame.caps[part]
    if settings.space == "layers":
        return Layers(frame.total, floors, caps)
    if settings.space == "joint":
        others = [table[part] for table in given[1:]]
        return Joint([given[0][part], *others], floors, caps, frame.choices, settings.group_size)
    return Heads(given[0][part], floors, caps, settings.group_size)


def groups_of(layers: int, size: int) -> list[slice]:
    """List groups of `size` consecutive layers from the bottom up; the last may be smaller."""
    return [slice(first, min(first + size, layers)) for first in range(0, layers, size)]
