"""The search itself: start plans first, then one stage after the other, each an optimiser in a space.

Everything that is measured goes through the ledger. A search that is resumed runs from its beginning again and finds
what it knows there, so an optimiser comes to the state it was in, in the middle of a generation if need be.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvsearch.errors import InternalError
from kvsearch.search.executors.base import Ints
from kvsearch.search.executors.population import worst_of
from kvsearch.search.fitness import cache_score, fitness, loss_score
from kvsearch.search.ledger import Ledger
from kvsearch.search.optimisers import Optimiser, create_optimiser
from kvsearch.search.records import Line
from kvsearch.search.scoring import LimitReachedError, Minibatch, Scoring
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.space import Vector
from kvsearch.search.stages import Frame, Stage, stages_of

STARTS = "start"
FLAT = 1e-6  # values that differ by less are the same


@dataclass(frozen=True, eq=False)
class Found:
    """A candidate [L, Hkv], its value on the samples it was measured on (less is better), and where it was found."""

    table: Ints
    value: float
    where: str


class Watcher(Protocol):
    """Told how a search goes; it decides nothing."""

    def stage(self, name: str, number: int, count: int) -> None:
        """A stage begins, `number` of `count` from 1 on."""
        ...

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Found) -> None:
        """A generation is measured; values are to be minimised, NaN for candidates that failed."""
        ...

    def note(self, text: str) -> None:
        """Something worth knowing."""
        ...


@dataclass
class Outcome:
    """What a search found: the candidates worth a second look, the best first, and why it ended.

    `flat`: nothing that was tried made a difference.
    """

    pool: list[Found] = field(default_factory=list)
    ended: str = "all stages are finished"
    flat: bool = False

    @property
    def best(self) -> Found:
        """The best candidate; InternalError if nothing was measured."""
        if not self.pool:
            raise InternalError("a search ended before anything was measured")
        return self.pool[0]


class Search:
    """One search; `run` may be interrupted at any time and repeated with the same ledger.

    Args:
        settings: what is searched.
        frame: floors and caps of the budgets, and the budget that is shared.
        starts: candidates that are measured first, by name; the first is uniform.
        scoring: what candidates are worth.
        ledger: of the run.
        samples: how many there are.
        watcher: told how it goes.
    """

    def __init__(
        self,
        settings: EvolveSettings,
        frame: Frame,
        starts: Mapping[str, Ints],
        scoring: Scoring,
        ledger: Ledger,
        samples: int,
        watcher: Watcher,
    ) -> None:
        self.settings, self.frame, self.starts = settings, frame, dict(starts)
        self.scoring, self.ledger, self.samples, self.watcher = scoring, ledger, samples, watcher
        self.outcome = Outcome()
        self._current = Found(next(iter(self.starts.values())), math.inf, STARTS)  # where the next stage begins
        self._seen: list[float] = []  # all values, to tell whether anything matters

    def run(self) -> Outcome:
        """Search until all stages are finished, a limit is reached, or nothing makes a difference.

        Raises:
            EnvironmentFault, IncompatibleError: more than half of a generation failed, or the disk is full.
        """
        try:
            self._measure_starts()
            for stage in stages_of(self.settings, self.frame, self.starts, lambda: self._current.table):
                self.watcher.stage(stage.name, stage.number, stage.count)
                self._current = self._run_stage(stage, self._current)
                if self._is_flat():
                    break
        except LimitReachedError as limit:
            self.outcome.ended = str(limit)
        self._recheck()
        return self.outcome

    # --- stages ---------------------------------------------------------------------------------------------------

    def _measure_starts(self) -> None:
        line = self._begin(STARTS)
        names, tables = list(self.starts), list(self.starts.values())
        values = self.scoring(tables, line)
        self._seen += values
        for name, table, value in zip(names, tables, values, strict=True):
            self._note(Found(table, value, f"start {name}"))
        if not self.outcome.pool:
            raise LimitReachedError("no start plan could be measured")
        if not self.settings.parity:  # the paper begins with even budgets, and with no fitness
            self._current = self.outcome.best
        self.watcher.generation(STARTS, 0, values, self.outcome.best)

    def _run_stage(self, stage: Stage, current: Found) -> Found:
        space, settings = stage.space, self.settings
        optimiser = self._optimiser(stage, current)
        best = current
        for generation in range(settings.generations):
            if optimiser.finished is not None:
                break
            points = optimiser.ask()
            line = self._asked(stage.name, generation, points)
            tables = [space.budgets(point) for point in points]
            samples = self._minibatch(stage.name, generation)
            values = self._fitness(stage, tables, self.scoring(tables, line, samples))
            self._seen += values
            told = _finite(values)
            projected = [space.project(point) for point in points]
            optimiser.tell(projected, told)
            if len(self.ledger.told(stage.name)) <= generation:
                self.ledger.append("told", stage=stage.name, generation=generation, points=projected, values=told)
            order = int(np.argmin(told))
            found = Found(tables[order], values[order], f"{stage.name}, generation {generation}")
            best = self._better(best, found) if samples is None else found
            self._note(found)
            self.watcher.generation(stage.name, generation, values, self.outcome.best)
            if self._is_flat():
                break
        guess = space.budgets(optimiser.best_guess)
        line = self._begin(f"{stage.name}, mean")
        value = self._fitness(stage, [guess], self.scoring([guess], line))[0]
        mean = Found(guess, value, f"{stage.name}, mean")
        self._note(mean)
        return self._better(best, mean)

    def _optimiser(self, stage: Stage, current: Found) -> Optimiser:
        space, settings = stage.space, self.settings
        name = "golden" if space.dimension == 1 else settings.optimiser
        population = settings.population if name in ("cma", "random") else None
        start = np.clip(space.point_of(current.table), space.lower, space.upper)
        tolerance = 0.5 / settings.budget
        optimiser = create_optimiser(
            name,
            start,
            space.lower,
            space.upper,
            _seed(settings.seed, stage.name),
            population,
            settings.sigma,
            tolerance,
        )
        if stage.inject:
            optimiser.inject([np.clip(space.point_of(table), space.lower, space.upper) for table in stage.inject])
        return optimiser

    def _fitness(self, stage: Stage, tables: Sequence[Ints], values: Sequence[float]) -> list[float]:
        """Values to minimise; the paper's have the cache term of the stage's own layers in them."""
        if not self.settings.parity:
            return list(values)
        found = []
        for table, value in zip(tables, values, strict=True):
            score = -value if self.settings.objective == "metric" else loss_score(value)
            cache = cache_score(float(table[stage.rows].mean()), self.settings.budget, self.settings.gamma)
            found.append(-fitness(score, cache, self.settings.lam))
        return found

    # --- the ledger -----------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Line:
        for line in self.ledger.stages():
            if line.name == name and line.begins:
                return line
        return self.ledger.append("stage", name=name, begins=True)

    def _asked(self, stage: str, generation: int, points: Sequence[Vector]) -> Line:
        known = self.ledger.asked(stage)
        if generation < len(known):
            if not all(np.array_equal(a, b) for a, b in zip(known[generation].vectors, points, strict=False)):
                raise InternalError(
                    f"stage {stage!r}, generation {generation}: the search asks for other points than its ledger says"
                )
            return known[generation]
        return self.ledger.append("asked", stage=stage, generation=generation, points=[p.tolist() for p in points])

    def _note(self, found: Found) -> None:
        """Take a candidate into the pool, which is sorted by value; write down a new best."""
        if not math.isfinite(found.value):
            return
        before = self.outcome.pool[0] if self.outcome.pool else None
        same = [one for one in self.outcome.pool if np.array_equal(one.table, found.table)]
        if same and same[0].value <= found.value:
            return
        self.outcome.pool = [one for one in self.outcome.pool if one not in same]
        self.outcome.pool.append(found)
        self.outcome.pool.sort(key=lambda one: one.value)
        best = self.outcome.pool[0]
        written = self.ledger.best
        if best is not before and (written is None or best.value < written.value):
            self.ledger.append("best", candidate=best.table, value=best.value, where=best.where)

    def _recheck(self) -> None:
        """Measure what generations on minibatches found on all samples, so that values can be compared."""
        if self.settings.minibatch is None and not self.settings.parity:
            return
        pool, self.outcome.pool = self.outcome.pool, []
        line = self._begin("on all samples")
        try:
            values = self.scoring([one.table for one in pool], line)
        except LimitReachedError as limit:
            self.outcome.ended, self.outcome.pool = str(limit), pool
            return
        for one, value in zip(pool, values, strict=True):
            self._note(Found(one.table, value, one.where))

    def _better(self, one: Found, other: Found) -> Found:
        return other if other.value < one.value else one

    def _minibatch(self, stage: str, generation: int) -> Minibatch:
        size = self.settings.minibatch
        if size is None or size >= self.samples:
            return None
        rng = random.Random(f"{self.settings.seed}/{stage}/{generation}")
        return tuple(sorted(rng.sample(range(self.samples), size)))

    def _is_flat(self) -> bool:
        seen = [value for value in self._seen if math.isfinite(value)]
        self.outcome.flat = bool(seen) and max(seen) - min(seen) <= FLAT * max(1.0, abs(max(seen)))
        if self.outcome.flat:
            self.outcome.ended = f"{len(seen)} plans and all the same: this budget does not matter here"
        return self.outcome.flat


def _finite(values: Sequence[float]) -> list[float]:
    """Values with a finite worst one for candidates that failed."""
    if all(math.isfinite(value) for value in values):
        return list(values)
    worst = worst_of(values)
    return [value if math.isfinite(value) else worst for value in values]


def _seed(seed: int, stage: str) -> int:
    """A seed for every stage, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}".encode()).digest()[:4], "big")
