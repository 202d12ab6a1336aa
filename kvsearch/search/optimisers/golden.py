"""Golden section search, for groups of one layer: one dimension only."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from kvsearch.arrays import Vector
from kvsearch.errors import UsageError
from kvsearch.search.optimisers.base import Optimiser, Problem

SHARE = (math.sqrt(5) - 1) / 2  # of the bracket that is left after each generation


class Golden(Optimiser):
    """Golden section search (Kiefer 1953) of [lower, upper] for the minimum of a function of one variable.

    Two inner points divide the bracket; the side behind the worse one is cut off, and the better one divides what is
    left. So the first generation has two points, every other has one. It is exact where the function falls, then rises.
    Budgets are whole, so the function has plateaus: of two equal points the one nearer to the start stays, and where
    the function is flat the search ends at the start. It is finished when the bracket is no longer than the tolerance.
    """

    name: ClassVar[str] = "golden"
    has_population: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if self.dimension != 1:
            raise UsageError(f"golden section search has one dimension, not {self.dimension}: use the optimiser cma")
        self._low, self._high = float(self.lower[0]), float(self.upper[0])
        self._inner = [self._divide(1 - SHARE), self._divide(SHARE)]
        self._values: list[float | None] = [None, None]  # of the inner points

    @property
    def finished(self) -> str | None:
        if self._high - self._low > self.tolerance:
            return None
        return f"the bracket [{self._low:.4g}, {self._high:.4g}] is no longer than the tolerance of {self.tolerance:g}"

    def _ask(self) -> list[Vector]:
        return [np.array([x]) for x, value in zip(self._inner, self._values, strict=True) if value is None]

    def _tell(self, points: list[Vector], values: list[float]) -> None:  # noqa: ARG002
        fresh = iter(values[-self._values.count(None) :])
        left, right = (next(fresh) if value is None else value for value in self._values)
        if (left, self._distance(0)) <= (right, self._distance(1)):
            self._high = self._inner[1]
            self._inner, self._values = [self._divide(1 - SHARE), self._inner[0]], [None, left]
        else:
            self._low = self._inner[0]
            self._inner, self._values = [self._inner[1], self._divide(SHARE)], [right, None]

    def _divide(self, share: float) -> float:
        return self._low + share * (self._high - self._low)

    def _distance(self, inner: int) -> float:
        return abs(self._inner[inner] - float(self.start[0]))
