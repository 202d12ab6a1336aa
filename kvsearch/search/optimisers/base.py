"""The Optimiser seam: ask for points, tell their values.

An optimiser minimises. It sees vectors and numbers only, never a model or a plan. One seed gives one search: no global
random state is read or changed, so a fresh instance that is told the same values asks for the same points bit for bit,
and a search can be resumed from the record of what was told.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsearch.core.arrays import Ints, Vector


@dataclass(frozen=True, eq=False)
class Problem:
    """Where to search, and how.

    Args:
        start: where to begin, [d] within the bounds.
        lower: least value of each coordinate, [d].
        upper: largest value of each coordinate, [d].
        seed: 0 or more; optimisers without chance do not read it.
        population: points per generation; None is the optimiser's own choice, and some have no other.
        sigma: first step, in units of x; golden section search starts from the bounds instead.
        tolerance: in units of x; once steps are smaller the search is finished. Half an entry is a good value: smaller
            steps change no budget. Random search has no steps, and so no end.
        categories: how many choices 0, 1, ... each coordinate has that stands for one of several things, [d], 0 where
            it is a number; None: all are numbers.
    """

    start: Vector
    lower: Vector
    upper: Vector
    seed: int = 0
    population: int | None = None
    sigma: float = 0.3
    tolerance: float = 1e-3
    categories: Ints | None = None


class Optimiser(ABC):
    """Searches the box [lower, upper] for the point with the smallest value."""

    def __init__(self, problem: Problem) -> None:
        self.start = problem.start
        self.lower = problem.lower
        self.upper = problem.upper
        self.dimension = len(problem.start)
        self.tolerance = problem.tolerance
        self._injected: list[Vector] = []
        self._best: tuple[float, float] | None = None  # value, distance from the start
        self._best_point = self.start

    def inject(self, points: Sequence[Vector]) -> None:
        """Add points, each [d] within the bounds, to the first generation: they come before the optimiser's own.

        Call it before the first `ask`, and so again before the same search is replayed.
        """
        self._injected += points

    def ask(self) -> list[Vector]:
        """Return points of the next generation, each float64 [d] within the bounds."""
        points = [*self._injected, *self._ask()]
        self._injected = []
        return [point.copy() for point in points]

    def tell(self, points: Sequence[Vector], values: Sequence[float]) -> None:
        """Say how good the points of the generation are that was asked for.

        Args:
            points: where they really were, each [d] within the bounds, in the order asked: `Space.project` of them.
            values: their values, finite, smaller is better.
        """
        inside = [np.clip(point, self.lower, self.upper) for point in points]  # computed points may miss a bound
        for point, value in zip(inside, values, strict=True):
            rank = value, float(np.linalg.norm(point - self.start))
            if self._best is None or rank < self._best:
                self._best = rank
                self._best_point = point.copy()
        self._tell(inside, list(values))

    @property
    def best_guess(self) -> Vector:
        """The best point told, [d]; among equals the one nearest to the start, then the first. At first the start."""
        return self._best_point.copy()

    @property
    def finished(self) -> str | None:
        """Why the search is over, in words; None while it is not."""
        return None

    @abstractmethod
    def _ask(self) -> list[Vector]:
        """Return the optimiser's own points of the next generation, within the bounds."""

    def _tell(self, points: list[Vector], values: list[float]) -> None:  # noqa: B027 - not all learn
        """Learn from a generation; the optimiser's own points come last. The points may be changed."""


def default_population(dimension: int) -> int:
    """Return 4 + floor(3 ln d), EvolKV's population for a group of d layers (arXiv 2509.08315, section 4.1)."""
    return 4 + math.floor(3 * math.log(dimension))
