"""The stages of a search: which part of the budgets is varied, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvsearch.arrays import Ints
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import water_fill
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.space import Basis, Group, Heads, Layers, Parity, Space, basis_from_tables

EVEN = ("uniform", "pyramid")  # start plans that need no measurement


@dataclass(frozen=True, eq=False)
class Frame:
    """What all candidates [L, Hkv] keep to: `budget` entries per kv head on average, and bounds of each head."""

    budget: int
    floors: Ints
    caps: Ints

    @property
    def layers(self) -> int:
        return int(self.floors.shape[0])

    @property
    def heads(self) -> int:
        return int(self.floors.shape[1])

    @property
    def total(self) -> int:
        """Entries of all layers and heads."""
        return self.budget * self.layers * self.heads

    def complete(self, table: Ints) -> Ints:
        """Scale budgets to the total (section 3.2), at another budget c than theirs too (section 4.2.1).

        EvolKV's rule is b_i = ceil(k_i * T / A), where A is the sum of all k_i and T = c * L the total wanted. For L
        layers that is up to L - 1 entries too many: for T = 240 [101, 50, 30, 20] becomes [121, 60, 36, 24], which is
        241. Here the same shares are water-filled between the bounds, of which the paper says nothing, and rounded by
        largest remainders, so that the sum is T: [120, 60, 36, 24].
        """
        return water_fill(table, self.total, self.floors, self.caps)


@dataclass(frozen=True, eq=False)
class SearchStage:
    """One optimisation, `number` of `count`; `rows` are the layers that are varied, `inject` what it is told first."""

    name: str
    number: int
    count: int
    space: Space
    rows: slice
    inject: list[Ints] = field(default_factory=list)


def stages_of(
    settings: EvolveSettings, frame: Frame, starts: Mapping[str, Ints], current: Callable[[], Ints]
) -> Iterator[SearchStage]:
    """Yield the stages of a search, each made when it begins; `current` is the best table then.

    Raises:
        UsageError: the spaces "heads" and "basis" without start plans, and what spaces refuse.
    """
    space: Space
    if settings.space == "groups":
        groups = groups_of(frame.layers, settings.group_size)
        for number, rows in enumerate(groups, 1):
            name = f"layers {rows.start}-{rows.stop - 1}" if rows.stop - rows.start > 1 else f"layer {rows.start}"
            members = list(range(rows.start, rows.stop))
            if settings.parity:
                space = Parity(current(), members, frame.budget, frame.floors)
            elif len(groups) == 1:
                space = Layers(frame.total, frame.floors, frame.caps)
            else:
                space = Group(current(), members, frame.floors, frame.caps)
            yield SearchStage(name, number, len(groups), space, rows)
        return
    tables = list(starts.values())
    given = [table for name, table in starts.items() if name not in EVEN]
    if settings.space == "layers":
        space = Layers(frame.total, frame.floors, frame.caps)
    elif not given:
        raise UsageError(f"space {settings.space} is made of start plans: give some with --start")
    elif settings.space == "basis":
        space = Basis(tables[0], basis_from_tables(tables[1:], frame.floors), frame.floors, frame.caps)
    else:
        space = Heads(given[0], frame.floors, frame.caps, settings.group_size)
    yield SearchStage(settings.space, 1, 1, space, slice(0, frame.layers), tables)


def groups_of(layers: int, size: int) -> list[slice]:
    """List groups of `size` consecutive layers from the bottom up; the last may be smaller."""
    return [slice(first, min(first + size, layers)) for first in range(0, layers, size)]
