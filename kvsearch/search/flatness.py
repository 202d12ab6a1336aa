"""Whether the budgets matter at all: what was measured may be the same for all candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvsearch.search.executors.base import Ints
from kvsearch.search.scoring import Minibatch

FLAT = 1e-6  # relative; values that differ by less are the same


class Flatness:
    """The smallest and the largest value on each set of samples, and how many different candidates there were."""

    def __init__(self, objective: str) -> None:
        self._objective = objective
        self._ranges: dict[Minibatch, tuple[float, float]] = {}
        self._plans: set[bytes] = set()

    def add(self, tables: Iterable[Ints], values: Iterable[float], samples: Minibatch = None) -> None:
        """Take note of values, as measured; those that are not finite do not count."""
        for table, value in zip(tables, values, strict=True):
            if math.isfinite(value):
                low, high = self._ranges.get(samples, (value, value))
                self._ranges[samples] = (min(low, value), max(high, value))
                self._plans.add(table.tobytes())

    @property
    def verdict(self) -> str | None:
        """Why there is nothing to search, in words; None if different plans differ, or only one was tried."""
        if len(self._plans) < 2 or any(high - low > FLAT * max(1.0, abs(high)) for low, high in self._ranges.values()):
            return None
        if self._objective == "metric" and all(high == 0 for _, high in self._ranges.values()):
            return f"the metric is zero for all {len(self._plans)} plans, so it tells none apart: search by nll"
        return f"{len(self._plans)} plans and all the same: this budget does not matter here"
