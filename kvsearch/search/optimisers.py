"""Optimisers with an ask/tell interface: ask for points, tell their values.

An optimiser minimises. It sees vectors and numbers only, never a model or a plan. One seed gives one search: no global
random state is read or changed, so a fresh instance that is told the same values asks for the same points bit for bit,
and a search can be resumed from the record of told values.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsearch.core.arrays import Ints, Vector

KEPT_BRACKET = (math.sqrt(5) - 1) / 2  # of the bracket that is left after each generation of golden section search
STEP_GROWTH = 1.5  # of the step of `MixedSearch` after a generation that found something better
FLAT_STEP_GROWTH = 2.0  # of the step after a generation that told nothing apart
FLAT_TOLERANCE = 1e-6  # relative; values that differ by less are the same
STEP_SHRINK = STEP_GROWTH**-0.25  # else: steps stay where a fifth of the generations find something (Rechenberg 1973)


@dataclass(frozen=True, eq=False)
class Problem:
    """An optimisation problem: bounds, start, seed and step sizes.

    Args:
        start: where to begin, [d] within the bounds.
        lower: least value of each coordinate, [d].
        upper: largest value of each coordinate, [d].
        seed: 0 or more.
        population: points per generation; None is the optimiser's own choice. Golden section search has no other.
        sigma: first step, in units of x; golden section search starts from the bounds instead.
        tolerance: in units of x; once steps are smaller the search is finished. Half an entry is a good value: smaller
            steps change no budget.
        categories: how many choices 0, 1, ... each coordinate has that stands for one of several things, [d], 0 where
            it is a number; None: all are numbers.
        value: of the start; infinite where it is not known.
    """

    start: Vector
    lower: Vector
    upper: Vector
    seed: int = 0
    population: int | None = None
    sigma: float = 0.3
    tolerance: float = 1e-3
    categories: Ints | None = None
    value: float = math.inf


def is_flat(values: Collection[float]) -> bool:
    """Tell whether all values are equal, up to a relative difference of `FLAT_TOLERANCE`."""
    return max(values) - min(values) <= FLAT_TOLERANCE * max(1.0, abs(max(values)))


class Optimiser(ABC):
    """Minimises a function over the box [lower, upper] by ask and tell."""

    def __init__(self, problem: Problem) -> None:
        self.start = problem.start
        self.lower = problem.lower
        self.upper = problem.upper
        self.dimension = len(problem.start)
        self.tolerance = problem.tolerance
        self._injected: list[Vector] = []
        self._best: tuple[float, float] | None = None  # value, distance from the start
        self._best_point = self.start
        self._extremes = [problem.value] if math.isfinite(problem.value) else []  # least and largest measured so far
        self._has_failed = False  # a candidate of the last generation

    def inject(self, points: Sequence[Vector]) -> None:
        """Add points, each [d] within the bounds, to the first generation: they come before the optimiser's own.

        Call it before the first `ask`, and so again before the same search is replayed.
        """
        self._injected += points

    def ask(self) -> list[Vector]:
        """Propose the points of the next generation, each float64 [d] within the bounds."""
        # Before the optimiser's own, which it finds as the last of a generation when values are told.
        points = [*self._injected, *self._ask()]
        self._injected = []
        return [point.copy() for point in points]

    def tell(self, points: Sequence[Vector], values: Sequence[float], measured: Sequence[float] | None = None) -> None:
        """Report the values of the points of the generation that was asked for last.

        Args:
            points: where they really were, each [d] within the bounds, in the order asked: `Space.project` of them.
            values: their values, finite, smaller is better.
            measured: the values without penalties of failed candidates, which say nothing of how much points differ;
                None: all.
        """
        inside = [np.clip(point, self.lower, self.upper) for point in points]  # computed points may miss a bound
        for point, value in zip(inside, values, strict=True):
            # Of equal values the point nearest to the start.
            rank = value, float(np.linalg.norm(point - self.start))
            if self._best is None or rank < self._best:
                self._best = rank
                self._best_point = point.copy()
        if known := [*self._extremes, *(values if measured is None else measured)]:
            self._extremes = [min(known), max(known)]
        self._has_failed = measured is not None and len(measured) < len(values)
        self._tell(inside, list(values))

    @property
    def _all_values_equal(self) -> bool:
        """Whether all values measured so far, that of the start included, are the same."""
        return is_flat(self._extremes)

    @property
    def _learned_nothing(self) -> bool:
        """Whether all values so far are equal and no candidate of the last generation failed."""
        return self._all_values_equal and not self._has_failed

    def _widen_step(self, step: float) -> float:
        """Return a wider step for the generation after one with equal values, at most as wide as the box."""
        # Wider than the box tells nothing more.
        return max(step, min(FLAT_STEP_GROWTH * step, float((self.upper - self.lower).max())))

    @property
    def best_guess(self) -> Vector:
        """The best point so far, [d], at first the start; of equal ones the nearest to the start, then the first."""
        return self._best_point.copy()

    @property
    def finished(self) -> str | None:
        """Reason why the optimiser has converged, for messages; None while it has not."""
        return None

    @abstractmethod
    def _ask(self) -> list[Vector]:
        """Propose the optimiser's own points of the next generation, within the bounds."""

    @abstractmethod
    def _tell(self, points: list[Vector], values: list[float]) -> None:
        """Learn from a generation; the optimiser's own points come last. The points may be changed."""


def default_population(dimension: int) -> int:
    """Return 4 + floor(3 ln d), EvolKV's population for a group of d layers (arXiv 2509.08315, section 4.1)."""
    return 4 + math.floor(3 * math.log(dimension))


class CMA(Optimiser):
    """CMA-ES (Hansen and Ostermeier 2001) by pycma, set up so that a search can be replayed from its log.

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
    - While all values are the same, no direction is better: the mean stays where it is, and the step doubles (Hansen
      2016, "The CMA Evolution Strategy: A Tutorial", appendix B.3, "Flat fitness"). A metric of few questions is flat
      for small steps. A generation in which candidates failed is learned from, so that steps do not grow into failures.

    It needs two dimensions or more. The population is 4 + floor(3 ln d) by default: 6, 8, 10, 12, 14 points for 2, 4,
    8, 16, 32 dimensions.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pycma warns at import that it cannot plot
            import cma
        options = {
            "popsize": problem.population or default_population(self.dimension),
            "randn": Normal(problem.seed),
            "seed": math.nan,
            "CMA_active": False,
            "conditioncov_alleviate": None,  # it would change the coordinates in the middle of a search
            "verbose": -9,
        }
        self._strategy = cma.CMAEvolutionStrategy(self.start, problem.sigma, options)

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
        if not self._learned_nothing:
            self._strategy.tell(points, values)
            return
        # pycma is not told of a flat generation: it would learn from the order of equal points.
        self._strategy.sigma = self._widen_step(self._strategy.sigma)


class Normal:
    """Standard normal samples of any shape, for pycma, from its own generator; picklable."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> NDArray[np.float64]:
        return self._rng.standard_normal(shape)


class GoldenSection(Optimiser):
    """Golden section search (Kiefer 1953) of [lower, upper] for the minimum of a function of one variable.

    Two inner points divide the bracket; the side behind the worse one is cut off, and the better one divides what is
    left. So the first generation has two points, every other has one. It is exact where the function falls, then rises.
    Budgets are whole, so the function has plateaus: of two equal points the one nearer to the start stays, and where
    the function is flat the search ends at the start. If the first points tell nothing apart, both bounds come next; if
    one is better, the search goes on between it and the inner point beside it. It is finished when the bracket is no
    longer than the tolerance.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._low = float(self.lower[0])
        self._high = float(self.upper[0])
        self._inner = [self._divide(1 - KEPT_BRACKET), self._divide(KEPT_BRACKET)]
        self._values: list[float | None] = [None, None]  # of the inner points
        self._at_bounds: bool | None = None  # whether the bounds come next; None: they were not asked for yet

    @property
    def finished(self) -> str | None:
        if self._high - self._low > self.tolerance:
            return None
        return f"the bracket [{self._low:.4g}, {self._high:.4g}] is no longer than the tolerance of {self.tolerance:g}"

    def _ask(self) -> list[Vector]:
        if self._at_bounds:
            return [self.lower, self.upper]
        return [np.array([x]) for x, value in zip(self._inner, self._values, strict=True) if value is None]

    def _tell(self, points: list[Vector], values: list[float]) -> None:  # noqa: ARG002
        if self._at_bounds:
            self._at_bounds = False
            self._tell_bounds(*values[-2:])
            return
        # The values of injected points come first and are no inner points.
        fresh = iter(values[-self._values.count(None) :])
        left, right = (next(fresh) if value is None else value for value in self._values)
        self._values = [left, right]
        if self._at_bounds is None and self._all_values_equal:
            self._at_bounds = True
            return
        self._shrink(left, right)

    def _tell_bounds(self, lowest: float, highest: float) -> None:
        """Continue beside the better bound if it is better than the inner points, else as usual.

        Inner points are equal, or one has failed.
        """
        left, right = (value for value in self._values if value is not None)
        if min(lowest, highest) >= min(left, right) or self._all_values_equal:
            self._shrink(left, right)
            return
        if lowest <= highest:
            self._high = self._inner[0]
        else:
            self._low = self._inner[1]
        self._inner = [self._divide(1 - KEPT_BRACKET), self._divide(KEPT_BRACKET)]
        self._values = [None, None]

    def _shrink(self, left: float, right: float) -> None:
        """Cut off the side of the bracket behind the worse of the inner points, given their values."""
        if (left, self._distance(0)) <= (right, self._distance(1)):
            self._high = self._inner[1]
            self._inner = [self._divide(1 - KEPT_BRACKET), self._inner[0]]
            self._values = [None, left]
        else:
            self._low = self._inner[0]
            self._inner = [self._inner[1], self._divide(KEPT_BRACKET)]
            self._values = [right, None]

    def _divide(self, share: float) -> float:
        return self._low + share * (self._high - self._low)

    def _distance(self, inner: int) -> float:
        return abs(self._inner[inner] - float(self.start[0]))


class MixedSearch(Optimiser):
    """A (1 + lambda) evolution strategy in the numbers, in turns with a coordinate search of the choices.

    A generation of choices has the best point so far with one choice changed, for as many coordinates as there is
    place for, all of their other choices; coordinates take turns. A generation of numbers has normal steps of all
    numbers at once, with one step size. The first generation has the start, too. What is best becomes the centre. While
    all values are the same, the step doubles, as that of `CMA`. It is finished when steps are below the tolerance and a
    round of all choices has found nothing.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        counts = np.zeros(self.dimension) if problem.categories is None else problem.categories
        self._choices = [(at, int(count)) for at, count in enumerate(counts) if count > 1]
        self._numbers = np.flatnonzero(np.asarray(counts) == 0)
        self._population = problem.population or default_population(self.dimension)
        self._rng = np.random.default_rng(problem.seed)
        self._centre = self.start
        self._value = np.inf
        self._step = problem.sigma if self._numbers.size else 0.0
        self._next = 0  # coordinate whose turn it is
        self._untried = len(self._choices)  # that are left of a round without gain
        self._by_choice = bool(self._choices)
        self._asked_choices = 0

    @property
    def finished(self) -> str | None:
        if self._step >= self.tolerance or self._untried > 0:
            return None
        return f"steps of {self._step:.3g} are below the tolerance of {self.tolerance:g}, and no choice is better"

    def _ask(self) -> list[Vector]:
        first = [self._centre] if not np.isfinite(self._value) else []
        if self._by_choice:
            return [*self._list_other_choices(), *first]
        drawn = self._rng.standard_normal((self._population, self._numbers.size))
        points = np.repeat(self._centre[None], self._population, axis=0)
        points[:, self._numbers] += self._step * drawn
        return [*np.clip(points, self.lower, self.upper), *first]

    def _tell(self, points: list[Vector], values: list[float]) -> None:
        if not np.isfinite(self._value):  # the start, which comes last
            self._centre = points[-1]
            self._value = values[-1]
        best = int(np.argmin(values))
        is_better = values[best] < self._value
        if is_better:
            self._centre = points[best]
            self._value = values[best]
        if self._by_choice:
            self._next = (self._next + self._asked_choices) % len(self._choices)
            self._untried = len(self._choices) if is_better else max(self._untried - self._asked_choices, 0)
        elif self._learned_nothing:
            self._step = self._widen_step(self._step)
        else:
            self._step *= STEP_GROWTH if is_better else STEP_SHRINK
            if is_better:
                self._untried = len(self._choices)
        # Choices and numbers take turns while both may still find something.
        steps = self._numbers.size > 0 and self._step >= self.tolerance
        self._by_choice = self._untried > 0 and (not self._by_choice or not steps)

    def _list_other_choices(self) -> list[Vector]:
        points: list[Vector] = []
        self._asked_choices = 0
        for turn in range(len(self._choices)):
            at, count = self._choices[(self._next + turn) % len(self._choices)]
            if points and len(points) + count - 1 > self._population:
                break
            self._asked_choices += 1
            for choice in range(count):
                if choice != round(self._centre[at]):
                    point = self._centre.copy()
                    point[at] = choice
                    points.append(point)
        return points


def create_optimiser(problem: Problem) -> Optimiser:
    """Create the optimiser of a problem: `MixedSearch` for choices, `GoldenSection` for one dimension, else `CMA`.

    Examples:
        >>> problem = Problem(start=np.full(2, 0.5), lower=np.zeros(2), upper=np.ones(2), seed=1)
        >>> optimiser = create_optimiser(problem)
        >>> for _ in range(30):
        ...     points = optimiser.ask()
        ...     optimiser.tell(points, [float(((point - 0.3) ** 2).sum()) for point in points])
        >>> optimiser.best_guess.round(1).tolist()
        [0.3, 0.3]
    """
    if problem.categories is not None and problem.categories.any():
        return MixedSearch(problem)
    return GoldenSection(problem) if len(problem.start) == 1 else CMA(problem)
