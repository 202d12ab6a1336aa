"""Searches without a model of the function: random, coordinate by coordinate, and golden section search."""

from __future__ import annotations

import math

import numpy as np

from kvsearch.core.arrays import Vector
from kvsearch.search.optimisers.base import Optimiser, Problem, default_population

SHARE = (math.sqrt(5) - 1) / 2  # of the bracket that is left after each generation of golden section search


class Random(Optimiser):
    """Draws points uniformly around the start; what it is told changes nothing.

    In each coordinate it reaches from the start as far as the nearer bound, at least by sigma, so that the start is the
    mean where it can: from 1.0 within [0.3, 8] it draws from [0.3, 1.7]. It is never finished.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._population = problem.population or default_population(self.dimension)
        reach = np.maximum(np.minimum(self.start - self.lower, self.upper - self.start), problem.sigma)
        self._least: Vector = np.maximum(self.start - reach, self.lower)
        self._most: Vector = np.minimum(self.start + reach, self.upper)
        self._rng = np.random.default_rng(problem.seed)

    def _ask(self) -> list[Vector]:
        drawn = self._rng.uniform(self._least, self._most, (self._population, self.dimension))
        return list(np.clip(drawn, self.lower, self.upper))  # least + (most - least) may miss most by rounding


class Coordinate(Optimiser):
    """Compass search along the axes, without chance.

    A generation is the centre plus and minus one step along one axis; the first one has the start, too. The best point,
    if it is better than the centre, becomes the centre. The axes take turns. A round without progress halves the step,
    which is sigma at first; the search is finished when it is below the tolerance. Bounds cut steps short.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._centre = self.start
        self._value: float | None = None
        self._step = problem.sigma
        self._axis = 0
        self._moved = False
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
            self._centre = points[start]
            self._value = values[start]
        best = int(np.argmin(values))
        if values[best] < self._value:
            self._centre = points[best]
            self._value = values[best]
            self._moved = True
        self._turn()
        self._skip_fixed_axes()

    def _neighbours(self) -> list[Vector]:
        neighbours = []
        for step in (self._step, -self._step):
            point = self._centre.copy()
            point[self._axis] = np.clip(point[self._axis] + step, self.lower[self._axis], self.upper[self._axis])
            if point[self._axis] != self._centre[self._axis]:
                neighbours.append(point)
        return neighbours

    def _turn(self) -> None:
        """Go on to the next axis; after a round without progress with half the step."""
        self._axis = (self._axis + 1) % self.dimension
        if self._axis == 0:
            self._step = self._step if self._moved else self._step / 2
            self._moved = False

    def _skip_fixed_axes(self) -> None:
        while self.finished is None and not self._neighbours():
            self._turn()


class Golden(Optimiser):
    """Golden section search (Kiefer 1953) of [lower, upper] for the minimum of a function of one variable.

    Two inner points divide the bracket; the side behind the worse one is cut off, and the better one divides what is
    left. So the first generation has two points, every other has one. It is exact where the function falls, then rises.
    Budgets are whole, so the function has plateaus: of two equal points the one nearer to the start stays, and where
    the function is flat the search ends at the start. It is finished when the bracket is no longer than the tolerance.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._low = float(self.lower[0])
        self._high = float(self.upper[0])
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
            self._inner = [self._divide(1 - SHARE), self._inner[0]]
            self._values = [None, left]
        else:
            self._low = self._inner[0]
            self._inner = [self._inner[1], self._divide(SHARE)]
            self._values = [right, None]

    def _divide(self, share: float) -> float:
        return self._low + share * (self._high - self._low)

    def _distance(self, inner: int) -> float:
        return abs(self._inner[inner] - float(self.start[0]))
