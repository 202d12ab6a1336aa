"""What was measured: candidates, the pool of the best, and whether the budgets matter at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvsearch.arrays import Ints

FLAT = 1e-6  # relative; values that differ by less are the same
MOST = 1024  # candidates of a pool beside the start plans
STARTS = "start"  # where they were found

Minibatch = tuple[int, ...] | None  # samples that a generation sees; None: all


@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate [L, Hkv], its value on all samples (less is better), and where it was found.

    With parity, while the search runs, the value is minus the fitness.
    """

    table: Ints
    value: float
    where: str


@dataclass
class SearchOutcome:
    """What a search found: candidates worth a second look, the best first, and why it ended.

    These are the start plans and the best others, so many that no search has more finalists.

    `result` is what the paper's procedure comes to (with parity): the best group state, completed to the total; None if
    no candidate was measured, or `flat`. `mean` is what the optimiser of the last stage thinks best, which averages
    over noise. `flat`: nothing that was tried made a difference.
    """

    pool: list[Candidate] = field(default_factory=list)
    result: Candidate | None = None
    mean: Candidate | None = None
    ended: str = "all stages are finished"
    flat: bool = False

    def take(self, found: Iterable[Candidate]) -> None:
        """Add candidates with finite values to the pool; of equal ones the better stays, else the first."""
        pool = {one.table.tobytes(): one for one in self.pool}
        for one in found:
            key = one.table.tobytes()
            if math.isfinite(one.value) and (key not in pool or one.value < pool[key].value):
                pool[key] = one
        ranked = sorted(pool.values(), key=lambda one: one.value)
        self.pool = [*ranked[:MOST], *(one for one in ranked[MOST:] if one.where.startswith(STARTS))]


class Flatness:
    """The smallest and the largest value on each set of samples, and how many different candidates there were.

    Once two differ there is nothing more to note.
    """

    def __init__(self, objective: str) -> None:
        self._objective, self._differ = objective, False
        self._ranges: dict[Minibatch, tuple[float, float]] = {}
        self._plans: set[bytes] = set()

    def add(self, tables: Iterable[Ints], values: Iterable[float], samples: Minibatch = None) -> None:
        """Take note of values, as measured; those that are not finite do not count."""
        for table, value in zip(tables, values, strict=True):
            if math.isfinite(value) and not self._differ:
                low, high = self._ranges.get(samples, (value, value))
                low, high = self._ranges[samples] = min(low, value), max(high, value)
                self._plans.add(table.tobytes())
                self._differ = high - low > FLAT * max(1.0, abs(high))
        if self._differ:
            self._ranges.clear()
            self._plans.clear()

    @property
    def verdict(self) -> str | None:
        """Why there is nothing to search, in words; None if different plans differ, or only one was tried."""
        if len(self._plans) < 2:
            return None
        if self._objective == "metric" and all(high == 0 for _, high in self._ranges.values()):
            return f"the metric is zero for all {len(self._plans)} plans, so it tells none apart: search by nll"
        return f"{len(self._plans)} plans and all the same: this budget does not matter here"
