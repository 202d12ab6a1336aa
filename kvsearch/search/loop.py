"""The search itself: start plans first, then one stage after the other, each an optimiser in a space.

Everything that is measured goes through the log of trials. A search that is resumed runs from its beginning again and
finds what it knows there, so an optimiser comes to the state it was in, in the middle of a generation if need be.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.search.candidates import STARTS, Candidate, Flatness, Minibatch, SearchOutcome
from kvsearch.search.objectives import cache_score, fitness, loss_score
from kvsearch.search.optimisers import OPTIMISERS, Optimiser, Problem
from kvsearch.search.settings import WITH_POPULATION, EvolveSettings
from kvsearch.search.stages import Frame, SearchStage, stages_of
from kvsearch.search.trials import LimitReachedError, TrialRunner

COMPLETED = "completed"
ALL_LAYERS = slice(None)


class Watcher(Protocol):
    """Told how a search goes; it decides nothing."""

    def stage(self, name: str) -> None:
        """Hear that something begins."""

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        """Hear of a generation that is measured; values are to be minimised, NaN for candidates that failed."""

    def ended(self, why: str) -> None:
        """Hear that the search is over."""


@dataclass(eq=False)
class Search:
    """One search; `run` may be interrupted at any time and repeated with the same log.

    Args:
        settings: what is searched.
        frame: floors and caps of the budgets, and the budget that is shared.
        starts: candidates that are measured first, by name; the first is uniform.
        trials: what candidates are worth; its log has everything that the search does.
        samples: how many there are.
        watcher: told how it goes.
        name: in front of the names of stages, where one log has several searches.
    """

    settings: EvolveSettings
    frame: Frame
    starts: Mapping[str, Ints]
    trials: TrialRunner
    samples: int
    watcher: Watcher
    name: str = ""
    outcome: SearchOutcome = field(default_factory=SearchOutcome)
    _state: Candidate | None = None  # of all that stages tried, the best on all samples

    def __post_init__(self) -> None:
        self.log = self.trials.log
        self._current = Candidate(next(iter(self.starts.values())), math.inf, STARTS)  # where the next stage begins
        self._flatness = Flatness(self.settings.objective)

    def run(self) -> SearchOutcome:
        """Search until all stages are finished, a limit is reached, or nothing makes a difference.

        Raises:
            EnvironmentFault, IncompatibleError: more than half of a generation failed, or the disk is full.
        """
        try:
            self.watcher.stage(f"{self.name}start plans")
            line = self.log.begin(self.name + STARTS)
            where = [f"start {name}" for name in self.starts]
            values = self._measure(list(self.starts.values()), line, where, ALL_LAYERS)
            if not self.settings.parity:  # the paper begins with even budgets, and with no fitness
                self._current = self.outcome.pool[0]
            self.watcher.generation(STARTS, 0, values, self.outcome.pool[0])
            for stage in stages_of(self.settings, self.frame, self.starts, lambda: self._current.table):
                self.watcher.stage(f"{self.name}{stage.name} ({stage.number} of {stage.count})")
                self._current = self._run_stage(stage, self._current)
                if self.outcome.flat:
                    break
        except LimitReachedError as limit:
            self.outcome.ended = str(limit)
        if self.settings.parity:
            self._complete()
        self.watcher.ended(f"{self.name}{self.outcome.ended}")
        return self.outcome

    # --- stages ---------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: SearchStage, best: Candidate) -> Candidate:
        """Return the best of the stage and of `best`, with which it begins."""
        optimiser = self._optimiser(stage, best.table)
        for generation in range(self.settings.generations):
            if optimiser.finished is not None or self.outcome.flat:
                break
            best = _choose_better(best, self._run_generation(stage, generation, optimiser))
        if self.settings.parity or self.outcome.flat:  # the paper's procedure has no use for the mean
            return best
        where = f"{stage.name}, mean"
        mean = stage.space.budgets(optimiser.best_guess)
        (value,) = self._measure([mean], self.log.begin(self.name + where), [where], stage.rows)
        self.outcome.mean = Candidate(mean, value, where)
        return _choose_better(best, self.outcome.mean)

    def _run_generation(self, stage: SearchStage, generation: int, optimiser: Optimiser) -> Candidate:
        """Ask, measure, tell; return the best candidate."""
        where = f"{stage.name}, generation {generation}"
        points = optimiser.ask()
        line = self.log.begin(self.name + where)
        tables = [stage.space.budgets(point) for point in points]
        samples: Minibatch = None
        size = self.settings.minibatch
        if size is not None and size < self.samples:
            rng = random.Random(f"{self.settings.seed}/{self.name}{stage.name}/{generation}")
            samples = tuple(sorted(rng.sample(range(self.samples), size)))
        values = self._measure(tables, line, [where] * len(tables), stage.rows, samples)
        worst = worst_of(values)  # for candidates that failed
        told = [value if math.isfinite(value) else worst for value in values]
        projected = [stage.space.project(point) for point in points]
        optimiser.tell(projected, told)
        self.log.tell(self.name + stage.name, generation, projected, told)
        first = int(np.argmin(told))
        best = Candidate(tables[first], values[first], where)
        if samples is not None:
            line = self.log.begin(f"{self.name}{where}, on all samples")
            (value,) = self._measure([best.table], line, [where], stage.rows)
            best = replace(best, value=value)
        if (verdict := self._flatness.verdict) is not None:
            self.outcome.flat = True
            self.outcome.ended = verdict
        self.watcher.generation(stage.name, generation, values, self.outcome.pool[0])
        return best

    def _optimiser(self, stage: SearchStage, start: Ints) -> Optimiser:
        space = stage.space
        settings = self.settings
        name = "golden" if space.dimension == 1 else settings.optimiser
        seed = f"{settings.seed}/{self.name}{stage.name}"
        problem = Problem(
            space.point_of(start),
            space.lower,
            space.upper,
            int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"),  # the same on every machine
            settings.population if name in WITH_POPULATION else None,
            settings.sigma,
            tolerance=0.5 / self.frame.budget,  # half an entry: smaller steps change no budget
            categories=space.categories,
        )
        optimiser = OPTIMISERS[name](problem)
        optimiser.inject([space.point_of(table) for table in stage.inject])
        return optimiser

    # --- what candidates are worth --------------------------------------------------------------------------------

    def _measure(
        self,
        tables: Sequence[Ints],
        since: int,
        where: Sequence[str],
        rows: slice,
        samples: Minibatch = None,
    ) -> list[float]:
        """Return values to minimise; those on all samples go to the pool, also where a limit cuts in."""
        limit: LimitReachedError | None = None
        try:
            self.trials.measure(tables, since, samples)
        except LimitReachedError as reached:
            limit = reached
        values = self.trials.values(tables, samples)
        self._flatness.add(tables, values, samples)
        fitting = list(values)
        if self.settings.parity:  # the paper's have the cache term of the layers that a stage varies in them
            for place, (table, value) in enumerate(zip(tables, values, strict=True)):
                score = -value if self.settings.objective == "metric" else loss_score(value)
                cache = cache_score(float(table[rows].mean()), self.frame.budget, self.settings.gamma)
                fitting[place] = -fitness(score, cache, self.settings.lam)
        if samples is None:
            candidates = list(map(Candidate, tables, fitting, where))
            self.outcome.add(candidates)
            for candidate in candidates if rows != ALL_LAYERS else ():
                if math.isfinite(candidate.value) and (self._state is None or candidate.value < self._state.value):
                    self._state = candidate
            if self.outcome.pool:
                self.log.record_best(self.outcome.pool[0], self.name)
        if limit is not None:
            raise limit
        return fitting

    def _complete(self) -> None:
        """Do the paper's last step: the best group state is completed to the total.

        So are the next best, to be shown beside it; all are measured by the objective alone.
        """
        state = [] if self._state is None else [self._state]
        known = {table.tobytes() for table in self.starts.values()}
        known |= {candidate.table.tobytes() for candidate in state}
        others = [candidate for candidate in self.outcome.pool if candidate.table.tobytes() not in known]
        searched = [*state, *others][: self.settings.finalists]
        completed = []
        for candidate in searched:
            frame = replace(self.frame, caps=np.maximum(self.frame.caps, candidate.table))
            completed.append(frame.complete(candidate.table))
        tables = [*self.starts.values(), *completed]
        with suppress(LimitReachedError):
            self.trials.measure(tables, self.log.begin(self.name + COMPLETED))
        where = [f"start {name}" for name in self.starts]
        where += [f"{candidate.where}, {COMPLETED}" for candidate in searched]
        values = [value if math.isfinite(value) else math.inf for value in self.trials.values(tables)]
        candidates = list(map(Candidate, tables, values, where))
        first = candidates[len(self.starts) :][: len(state)]
        rest = [candidate for candidate in candidates if candidate not in first]
        self.outcome.pool = [*first, *sorted(rest, key=lambda candidate: candidate.value)]
        self.outcome.result = None if self.outcome.flat else next(iter(first), None)


def worst_of(values: Iterable[float]) -> float:
    """Return the finite value of a failed candidate: above (worse than) all finite `values` of its generation.

    The distance is the spread of the finite values, but at least 1 and at least the size of the largest: enough for any
    optimiser to turn away, not so much that a fitted surface has nothing else in it.
    """
    finite = [value for value in values if math.isfinite(value)]
    most = max(finite)
    least = min(finite)
    return min(most + max(most - least, abs(most), 1.0), sys.float_info.max)


def _choose_better(first: Candidate, second: Candidate) -> Candidate:
    return second if second.value < first.value else first
