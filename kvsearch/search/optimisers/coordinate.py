"""Coordinate search: one coordinate at a time, a step up and a step down, with steps that shrink."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsearch.arrays import Vector
from kvsearch.search.optimisers.base import Optimiser, Problem


class Coordinate(Optimiser):
    """Compass search along the axes, without chance.

    A generation is the centre plus and minus one step along one axis; the first one has the start, too. The best point,
    if it is better than the centre, becomes the centre. The axes take turns. A round without progress halves the step,
    which is sigma at first; the search is finished when it is below the tolerance. Bounds cut steps short.
    """

    name: ClassVar[str] = "coordinate"
    has_population: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._centre = self.start
        self._value: float | None = None
        self._step, self._axis, self._moved = problem.sigma, 0, False
        self._skip_fixed_axes()

    @property
    def finished(self) -> str | None:
        if self._step >= self.tolerance:
            return None
        return f"steps of {self._step:.3g} are below the tolerance of {self.tolerance:g}"

    def _ask(self) -> list[Vector]:
        return self._neighbours() if self._value is not None else [self._centre, *self._neighbours()]

    def _tell(self, points: list[Vector], values: list[float]) -> None:
        if self._value is None:
            start = len(points) - 1 - len(self._neighbours())  # injected points come before it
            self._centre, self._value = points[start], values[start]
        best = int(np.argmin(values))
        if values[best] < self._value:
            self._centre, self._value, self._moved = points[best], values[best], True
        self._turn()
        self._skip_fixed_axes()

    def _neighbours(self) -> list[Vector]:
        found = []
        for step in (self._step, -self._step):
            point = self._centre.copy()
            point[self._axis] = np.clip(point[self._axis] + step, self.lower[self._axis], self.upper[self._axis])
            if point[self._axis] != self._centre[self._axis]:
                found.append(point)
        return found

    def _turn(self) -> None:
        """Go on to the next axis; after a round without progress with half the step."""
        self._axis = (self._axis + 1) % self.dimension
        if self._axis == 0:
            self._step, self._moved = self._step if self._moved else self._step / 2, False

    def _skip_fixed_axes(self) -> None:
        while self.finished is None and not self._neighbours():
            self._turn()
