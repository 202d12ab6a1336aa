"""The Optimiser seam: ask for points, tell their values; optimisers by name.

An optimiser minimises. It sees vectors and numbers only, never a model or a plan. One seed gives one search: no global
random state is read or changed, so a fresh instance that is told the same values asks for the same points bit for bit,
and a search can be resumed from the record of what was told.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.arrays import Ints, Vector
from kvsearch.errors import UsageError
from kvsearch.naming import unknown

BUILT_IN = {
    "cma": "kvsearch.search.optimisers.cma:CMA",
    "coordinate": "kvsearch.search.optimisers.coordinate:Coordinate",
    "golden": "kvsearch.search.optimisers.golden:Golden",
    "mixed": "kvsearch.search.optimisers.mixed:Mixed",
    "random": "kvsearch.search.optimisers.random:Random",
}

SLACK = 1e-9  # by which a told point may miss the bounds: it was computed


@dataclass(frozen=True, eq=False)
class Problem:
    """Where to search, and how.

    Args:
        start: where to begin, [d].
        lower: least value of each coordinate, [d].
        upper: largest value of each coordinate, [d].
        seed: 0 or more; optimisers without chance do not read it.
        population: points per generation; None is the optimiser's own choice, and some have no other.
        sigma: first step, in units of x; golden section search starts from the bounds instead.
        tolerance: in units of x; once steps are smaller the search is finished. Half an entry is a good value: smaller
            steps change no budget. Random search has no steps, and so no end.
        categories: how many choices 0, 1, ... each coordinate has that stands for one of several things, [d], 0 where
            it is a number; None: all are numbers.

    Raises:
        UsageError: the start is outside the bounds, or an argument is out of range.
    """

    start: Vector
    lower: Vector
    upper: Vector
    seed: int = 0
    population: int | None = None
    sigma: float = 0.3
    tolerance: float = 1e-3
    categories: Ints | None = None

    def __post_init__(self) -> None:
        _check_box(self.start, self.lower, self.upper)
        if self.categories is not None and np.shape(self.categories) != self.start.shape:
            raise UsageError(f"categories must have shape [{self.dimension}], got {list(np.shape(self.categories))}")
        for fine, problem in (
            (self.seed >= 0, f"the seed must be 0 or more, got {self.seed}"),
            (self.population is None or self.population >= 1, f"a population of {self.population} has no points"),
            (0 < self.sigma < math.inf, f"sigma must be finite and above 0, got {self.sigma}"),
            (0 < self.tolerance < math.inf, f"the tolerance must be finite and above 0, got {self.tolerance}"),
        ):
            if not fine:
                raise UsageError(problem)

    @property
    def dimension(self) -> int:
        return len(self.start)


class Optimiser(ABC):
    """Searches the box [lower, upper] for the point with the smallest value.

    Raises:
        UsageError: the optimiser does not fit the dimension, has no population and is given one, or knows numbers only
            and is given categories.
    """

    name: ClassVar[str]
    has_population: ClassVar[bool] = True
    has_categories: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        if problem.categories is not None and np.any(problem.categories) and not self.has_categories:
            raise UsageError(f"the optimiser {self.name} searches numbers, not choices: use the optimiser mixed")
        if problem.population is not None and not self.has_population:
            raise UsageError(f"the optimiser {self.name} has no population: leave it out")
        self.start, self.lower, self.upper = (each.copy() for each in (problem.start, problem.lower, problem.upper))
        self.dimension, self.sigma, self.tolerance = problem.dimension, problem.sigma, problem.tolerance
        self._injected: list[Vector] = []
        self._asked: int | None = None  # points asked for and not told yet
        self._begun = False
        self._best: tuple[float, float] | None = None  # value, distance from the start
        self._best_point = self.start

    def inject(self, points: Sequence[Vector]) -> None:
        """Add points, each [d], to the first generation: they come before the optimiser's own points.

        Call it before the first `ask`, and so again before the same search is replayed.

        Raises:
            UsageError: the search has begun, or a point is outside the bounds.
        """
        if self._begun:
            raise UsageError(f"{self.name}: points can be injected before the first generation only")
        self._injected += [self._inside(point) for point in points]

    def ask(self) -> list[Vector]:
        """Return points of the next generation, each float64 [d] within the bounds.

        Raises:
            UsageError: the last generation was not told yet, or the search is finished.
        """
        if self._asked is not None:
            raise UsageError(f"{self.name}: asked twice: first tell the values of the {self._asked} points asked for")
        if self.finished is not None:
            raise UsageError(f"{self.name}: there is nothing left to ask: {self.finished}")
        points = [*(() if self._begun else self._injected), *self._ask()]
        self._begun, self._asked = True, len(points)
        return [point.copy() for point in points]

    def tell(self, points: Sequence[Vector], values: Sequence[float]) -> None:
        """Say how good the points of a generation are.

        Args:
            points: where they really were, each [d] within the bounds, in the order asked: `Space.project` of them.
            values: their values, smaller is better.

        Raises:
            UsageError: nothing was asked, the counts differ, or a point or value is unusable.
        """
        if self._asked is None:
            raise UsageError(f"{self.name}: told before it asked")
        if not len(points) == len(values) == self._asked:
            raise UsageError(
                f"{self.name}: asked for {self._asked} points, was told {len(points)} points and {len(values)} values"
            )
        told = [self._inside(point) for point in points]
        numbers = [_finite(self.name, value) for value in values]
        self._remember(told, numbers)
        self._tell(told, numbers)
        self._asked = None

    @property
    def best_guess(self) -> Vector:
        """The best point told, [d]; among equals the one nearest to the start, then the first. At first the start."""
        return self._best_point.copy()

    @property
    @abstractmethod
    def finished(self) -> str | None:
        """Why the search is over, in words; None while it is not."""

    @abstractmethod
    def _ask(self) -> list[Vector]:
        """Return the optimiser's own points of the next generation, within the bounds."""

    @abstractmethod
    def _tell(self, points: list[Vector], values: list[float]) -> None:
        """Learn from a generation; the optimiser's own points come last. The points may be changed."""

    def _remember(self, points: list[Vector], values: list[float]) -> None:
        for point, value in zip(points, values, strict=True):
            rank = value, float(np.linalg.norm(point - self.start))
            if self._best is None or rank < self._best:
                self._best, self._best_point = rank, point.copy()

    def _inside(self, point: Vector) -> Vector:
        """Return a copy of a point, moved onto a bound that it misses by rounding only."""
        given = np.asarray(point, dtype=np.float64)
        if given.shape != self.start.shape:
            raise UsageError(f"{self.name}: a point must have shape [{self.dimension}], got {list(given.shape)}")
        moved: Vector = np.clip(given, self.lower, self.upper)
        if not np.abs(given - moved).max() <= SLACK:  # NaN is not, either
            raise UsageError(f"{self.name}: the point {given.tolist()} is outside the bounds")
        return moved


def optimiser_names() -> list[str]:
    """List all names `create_optimiser` knows, sorted."""
    return sorted(BUILT_IN)


def create_optimiser(
    name: str,
    start: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    seed: int,
    population: int | None = None,
    sigma: float = 0.3,
    tolerance: float = 1e-3,
    categories: Ints | None = None,
) -> Optimiser:
    """Build an optimiser from its name; arguments and errors are those of `Problem` and of the optimiser."""
    if name not in BUILT_IN:
        raise UsageError(unknown("optimiser", name, optimiser_names()))
    module, _, attribute = BUILT_IN[name].partition(":")
    built: type[Optimiser] = getattr(import_module(module), attribute)
    first, low, high = (np.array(given, dtype=np.float64) for given in (start, lower, upper))
    return built(Problem(first, low, high, seed, population, sigma, tolerance, categories))


def default_population(dimension: int) -> int:
    """Return 4 + floor(3 ln d), EvolKV's population for a group of d layers (arXiv 2509.08315, section 4.1)."""
    return 4 + math.floor(3 * math.log(dimension))


def _check_box(start: Vector, lower: Vector, upper: Vector) -> None:
    if start.ndim != 1 or not start.size or not start.shape == lower.shape == upper.shape:
        shapes = ", ".join(str(list(given.shape)) for given in (start, lower, upper))
        raise UsageError(f"start, lower and upper must be vectors of one length, got shapes {shapes}")
    if not np.isfinite([start, lower, upper]).all():
        raise UsageError("start and bounds must be finite")
    wrong = np.flatnonzero((start < lower) | (start > upper))
    if wrong.size:
        at = int(wrong[0])
        raise UsageError(f"the start {start[at]:g} is outside its bounds [{lower[at]:g}, {upper[at]:g}] at index {at}")


def _finite(name: str, value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise UsageError(f"{name}: was told {number}: give a candidate that failed the worst finite value instead")
    return number
