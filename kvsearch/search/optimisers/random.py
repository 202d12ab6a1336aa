"""Random search: the yardstick that a search has to beat."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsearch.arrays import Vector
from kvsearch.search.optimisers.base import Optimiser, Problem, default_population


class Random(Optimiser):
    """Draws points uniformly around the start; what it is told changes nothing.

    In each coordinate it reaches from the start as far as the nearer bound, at least by sigma, so that the start is the
    mean where it can: from 1.0 within [0.3, 8] it draws from [0.3, 1.7]. It is never finished.
    """

    name: ClassVar[str] = "random"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._population = problem.population or default_population(self.dimension)
        reach = np.maximum(np.minimum(self.start - self.lower, self.upper - self.start), problem.sigma)
        self._least: Vector = np.maximum(self.start - reach, self.lower)
        self._most: Vector = np.minimum(self.start + reach, self.upper)
        self._rng = np.random.default_rng(problem.seed)

    @property
    def finished(self) -> str | None:
        return None

    def _ask(self) -> list[Vector]:
        drawn = self._rng.uniform(self._least, self._most, (self._population, self.dimension))
        return list(np.clip(drawn, self.lower, self.upper))  # least + (most - least) may miss most by rounding

    def _tell(self, points: list[Vector], values: list[float]) -> None:
        """Nothing to learn."""
