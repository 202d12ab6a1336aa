"""CMA-ES: the covariance matrix adaptation evolution strategy, EvolKV's optimiser."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.core.arrays import Vector
from kvsearch.search.optimisers.base import Optimiser, Problem, default_population


class CMA(Optimiser):
    """CMA-ES (Hansen and Ostermeier 2001) by pycma, made so that a search can be replayed from what it was told.

    - pycma reseeds numpy's global generator unless it is given a generator and a seed of NaN. It is given both.
    - pycma's rules for when to stop are never asked. They are meant for smooth functions: equal values in one
      generation, which whole budgets give, would end a search, and so would a file `cma_signals.in`. The search is
      finished when the standard deviation of every coordinate is below the tolerance. It must not go on: far below
      steps drown in rounding errors.
    - Points are clipped to the bounds here; pycma knows of no bounds. Its own way is a smooth map onto the box, which
      bends the space near the bounds, where budgets at their floor are. Clipped, a point is where it seems to be. On
      synthetic losses of 4 and 8 layers that made no difference, of 16 layers it left 6.0 % of the gap between uniform
      budgets and the optimum after 200 evaluations, the map 7.3 % (mean of 40 losses).
    - Told points may be others than those asked for; the more so if budgets have a total: those points lie in a plane.
      The active update, which learns from the worst points by negative weights, then blows up the variance across the
      plane, and the search wanders off. It is off: after 200 evaluations 0.02, 1.1 and 6.0 % of the gap were left for
      4, 8 and 16 layers instead of 0.24, 1.6 and 7.1 %, and after 2,500 under 0.1 % instead of 10 to 50 % (4 losses).
    - A told point that is too far for the distribution counts as one that is nearer, in its direction (Hansen 2011,
      "Injecting external solutions into CMA-ES"). So injected points need no place in the population: they are told
      besides it, and a good one draws the mean towards it.

    It needs two dimensions or more. The population is 4 + floor(3 ln d) by default: 6, 8, 10, 12, 14 points for 2, 4,
    8, 16, 32 dimensions.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        population = problem.population or default_population(self.dimension)
        self._strategy = _strategy(self.start, problem.sigma, population, Normal(problem.seed))

    @property
    def best_guess(self) -> Vector:
        """Mean of the distribution, [d]: it averages over the noise that makes a single best point look good."""
        mean: Vector = np.clip(self._strategy.mean, self.lower, self.upper)
        return mean

    @property
    def finished(self) -> str | None:
        spread = float(np.max(self._strategy.stds))
        if spread < self.tolerance:
            return f"the standard deviation is {spread:.3g} at most, below the tolerance of {self.tolerance:g}"
        return None

    def _ask(self) -> list[Vector]:
        return [np.clip(point, self.lower, self.upper) for point in self._strategy.ask()]

    def _tell(self, points: list[Vector], values: list[float]) -> None:
        self._strategy.tell(points, values)


class Normal:
    """Normal deviates by shape, as pycma asks for them, from a generator of its own; it can be pickled."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> NDArray[np.float64]:
        return self._rng.standard_normal(shape)


def _strategy(start: Vector, sigma: float, population: int, normal: Normal) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pycma warns at import that it cannot plot
        import cma
    options = {
        "popsize": population,
        "randn": normal,
        "seed": math.nan,
        "CMA_active": False,
        "conditioncov_alleviate": None,  # it would change the coordinates in the middle of a search
        "verbose": -9,
    }
    return cma.CMAEvolutionStrategy(start, sigma, options)
