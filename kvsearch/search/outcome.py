"""What a search found, and who is told while it goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvsearch.search.executors.base import Ints


@dataclass(frozen=True, eq=False)
class Found:
    """A candidate [L, Hkv], its value on all samples (less is better), and where it was found.

    With parity, while the search runs, the value is minus the fitness.
    """

    table: Ints
    value: float
    where: str


@dataclass
class Outcome:
    """What a search found: the candidates worth a second look, the best first, and why it ended.

    With parity the first one is the paper's result, whatever its value. `mean` is what the optimiser of the last stage
    thinks best, which averages over noise. `flat`: nothing that was tried made a difference.
    """

    pool: list[Found] = field(default_factory=list)
    mean: Found | None = None
    ended: str = "all stages are finished"
    flat: bool = False

    def take(self, found: Iterable[Found]) -> None:
        """Add candidates with finite values to the pool; of equal ones the better stays, else the first."""
        pool = {one.table.tobytes(): one for one in self.pool}
        for one in found:
            key = one.table.tobytes()
            if math.isfinite(one.value) and (key not in pool or one.value < pool[key].value):
                pool[key] = one
        self.pool = sorted(pool.values(), key=lambda one: one.value)


class Watcher(Protocol):
    """Told how a search goes; it decides nothing."""

    def stage(self, name: str) -> None:
        """Something begins."""
        ...

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Found) -> None:
        """A generation is measured; values are to be minimised, NaN for candidates that failed."""
        ...

    def ended(self, why: str) -> None:
        """The search is over."""
        ...
