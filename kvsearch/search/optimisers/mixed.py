"""Search of choices and numbers together: one best point, its neighbours by choice, and steps in its numbers."""

from __future__ import annotations

import numpy as np

from kvsearch.core.arrays import Vector
from kvsearch.search.optimisers.base import Optimiser, Problem, default_population

GROW = 1.5  # of the step after a generation that found something better
SHRINK = GROW**-0.25  # else: steps stay where a fifth of the generations find something (Rechenberg 1973)


class Mixed(Optimiser):
    """A (1 + lambda) evolution strategy in the numbers, in turns with a coordinate search of the choices.

    A generation of choices has the best point so far with one choice changed, for as many coordinates as there is
    place for, all of their other choices; coordinates take turns. A generation of numbers has normal steps of all
    numbers at once, with one step size. The first generation has the start, too. What is best becomes the centre. It is
    finished when steps are below the tolerance and a round of all choices has found nothing.
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
            return [*self._other_choices(), *first]
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
        else:
            self._step *= GROW if is_better else SHRINK
            if is_better:
                self._untried = len(self._choices)
        steps = self._numbers.size > 0 and self._step >= self.tolerance
        self._by_choice = self._untried > 0 and (not self._by_choice or not steps)

    def _other_choices(self) -> list[Vector]:
        found: list[Vector] = []
        self._asked_choices = 0
        for turn in range(len(self._choices)):
            at, count = self._choices[(self._next + turn) % len(self._choices)]
            if found and len(found) + count - 1 > self._population:
                break
            self._asked_choices += 1
            for choice in range(count):
                if choice != round(self._centre[at]):
                    point = self._centre.copy()
                    point[at] = choice
                    found.append(point)
        return found
