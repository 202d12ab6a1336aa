"""The search itself: start plans first, then one stage after the other, each an optimiser in a space.

Everything that is measured goes through the log of trials. A search that is resumed runs from its beginning again and
finds what it knows there, so an optimiser comes to the state it was in, in the middle of a generation if need be.

With parity a search is judged by EvolKV's fitness f * (1 + lam * CacheScore) (arXiv 2509.08315, Eq. 1 and 2), to be
maximised. It is a product, so f must be positive and larger must be better; its unit does not matter: a score in
percent and one in [0, 1] rank candidates alike. The cache term is soft: a candidate may be over budget if it is good
enough. With lam = 0.3 and gamma = 0.2 a budget that is exceeded by 25 % costs 1 - 1.225 / 1.3 = 5.8 % of the fitness,
one that is undercut by 25 % costs 1.2 %. A loss has no natural zero, so it cannot be f itself; f = exp(-loss) can. A
constant added to all losses is a factor of f and changes no ranking.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.search.optimisers import Optimiser, Problem, create_optimiser, is_flat
from kvsearch.search.settings import MAX_POOL, EvolveSettings
from kvsearch.search.stages import BudgetBounds, SearchStage, make_stages
from kvsearch.search.trials import START_PLANS, Candidate, LimitReachedError, TrialRunner

FLAT_GENERATIONS = 4  # of a stage without any difference, in steps that double; the next stage begins then
COMPLETED = "completed"
ALL_LAYERS = slice(None)
by_value = attrgetter("value")  # of candidates


@dataclass
class SearchOutcome:
    """The result of a search: a pool of candidates, best first, and why it ended.

    These are the start plans and the best others, so many that no search has more finalists.

    `result` is what the paper's procedure comes to (with parity): the best group state, completed to the total; None if
    no candidate was measured, or `flat`. `mean` is what the optimiser of the last stage thinks best, which averages
    over noise. `flat`: every stage was tried, and nothing made a difference.
    """

    pool: list[Candidate] = field(default_factory=list)
    result: Candidate | None = None
    mean: Candidate | None = None
    ended: str = "all stages are finished"
    flat: bool = False

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Add candidates with finite values to the pool; of equal ones the better stays, else the first."""
        pool = {candidate.table.tobytes(): candidate for candidate in self.pool}
        for candidate in candidates:
            key = candidate.table.tobytes()
            if math.isfinite(candidate.value) and (key not in pool or candidate.value < pool[key].value):
                pool[key] = candidate
        ranked = sorted(pool.values(), key=by_value)
        starts = [candidate for candidate in ranked[MAX_POOL:] if candidate.where.startswith(START_PLANS)]
        self.pool = [*ranked[:MAX_POOL], *starts]


def explain_flat_values(values: Collection[float], objective: str) -> str | None:
    """Explain why all plans have the same value; None if values differ, or there is only one plan.

    It speaks for all layers, so ask it once all stages have varied theirs.
    """
    if len(values) < 2 or not is_flat(values):
        return None
    if objective == "metric" and max(values) == 0:
        return f"the metric is zero for all {len(values)} plans, so it tells none apart: search by nll"
    return f"{len(values)} plans and all the same: this budget does not matter here"


class Watcher(Protocol):
    """Receives the progress of a search; it decides nothing."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        """A generation was measured; values are minimised, NaN for failed candidates."""

    def ended(self, why: str) -> None:
        """The search is over, for the reason `why`."""


@dataclass(eq=False)
class Search:
    """A search at one budget; `run` may be interrupted at any time and repeated with the same log.

    Args:
        settings: space, objective and optimiser settings.
        frame: floors and caps of the budgets, and the budget that is shared.
        starts: candidates that are measured first, by name; the first is uniform.
        trials: measures candidates; its log has everything that the search does.
        watcher: receives progress.
        name: prefix of stage names, where one log has several searches.
    """

    settings: EvolveSettings
    bounds: BudgetBounds
    starts: Mapping[str, Ints]
    trials: TrialRunner
    watcher: Watcher
    name: str = ""
    outcome: SearchOutcome = field(default_factory=SearchOutcome)
    _state: Candidate | None = None  # of all that stages tried, the best on all samples

    def __post_init__(self) -> None:
        self.log = self.trials.log
        self._current = Candidate(
            next(iter(self.starts.values())), math.inf, START_PLANS
        )  # where the next stage begins
        self._measured: dict[bytes, float] = {}  # the finite values of all plans, as measured

    def run(self) -> SearchOutcome:
        """Search until all stages are finished, or a limit is reached.

        Raises:
            EnvironmentFault, IncompatibleError: more than half of a generation failed, or the disk is full.
        """
        try:
            self.watcher.stage(f"{self.name}start plans")
            line = self.log.begin(self.name + START_PLANS)
            where = [f"start {name}" for name in self.starts]
            values = self._measure(list(self.starts.values()), line, where, ALL_LAYERS)
            # The best start plan is where the first stage begins.
            if not self.settings.parity:  # the paper begins with even budgets, and with no fitness
                self._current = self.outcome.pool[0]
            self.watcher.generation(START_PLANS, 0, values, self.outcome.pool[0])
            for stage in make_stages(self.settings, self.bounds, self.starts, lambda: self._current.table):
                self.watcher.stage(f"{self.name}{stage.name} ({stage.number} of {stage.count})")
                self._current = self._run_stage(stage, self._current)
            if (verdict := explain_flat_values(self._measured.values(), self.settings.objective)) is not None:
                self.outcome.flat = True
                self.outcome.ended = verdict
        except LimitReachedError as limit:
            self.outcome.ended = str(limit)
            if explain_flat_values(self._measured.values(), self.settings.objective) is not None:
                self.outcome.ended += f"; all {len(self._measured)} plans so far are worth the same"
        if self.settings.parity:
            self._complete()
        self.watcher.ended(f"{self.name}{self.outcome.ended}")
        return self.outcome

    # --- stages ---------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: SearchStage, best: Candidate) -> Candidate:
        """Run a stage from `best`; return the best candidate of both."""
        # Seeds follow from the stage's name: a search that is resumed asks for the same points.
        optimiser = self._create_optimiser(stage, best)
        measured = [best.value] if math.isfinite(best.value) else []  # in all generations of the stage
        for generation in range(self.settings.generations):
            if optimiser.finished is not None or (generation >= FLAT_GENERATIONS and is_flat(measured)):
                break
            candidate, values = self._run_generation(stage, generation, optimiser)
            measured += values
            best = min(best, candidate, key=by_value)
        if self.settings.parity:  # the paper's procedure has no use for the mean
            return best
        where = f"{stage.name}, mean"
        mean = stage.space.make_table(optimiser.best_guess)
        (value,) = self._measure([mean], self.log.begin(self.name + where), [where], stage.rows)
        self.outcome.mean = Candidate(mean, value, where)
        return min(best, self.outcome.mean, key=by_value)

    def _run_generation(
        self, stage: SearchStage, generation: int, optimiser: Optimiser
    ) -> tuple[Candidate, list[float]]:
        """Run one generation; return its best candidate, and the values of all that did not fail."""
        where = f"{stage.name}, generation {generation}"
        points = optimiser.ask()
        line = self.log.begin(self.name + where)
        tables = [stage.space.make_table(point) for point in points]
        values = self._measure(tables, line, [where] * len(tables), stage.rows)
        # Optimisers take finite values only.
        worst = penalise_failures(values)  # for candidates that failed
        penalised = [value if math.isfinite(value) else worst for value in values]
        measured = [value for value in values if math.isfinite(value)]
        projected = [stage.space.project(point) for point in points]
        # Where points really were: clipped and scaled to the total, not where they were asked for.
        optimiser.tell(projected, penalised, measured)
        self.log.tell(self.name + stage.name, generation, projected, penalised)
        # Penalties are worse than all measured values, so this is never a failed candidate.
        first = int(np.argmin(penalised))
        best = Candidate(tables[first], values[first], where)
        self.watcher.generation(stage.name, generation, values, self.outcome.pool[0])
        return best, measured

    def _create_optimiser(self, stage: SearchStage, start: Candidate) -> Optimiser:
        space = stage.space
        settings = self.settings
        seed = f"{settings.seed}/{self.name}{stage.name}"
        problem = Problem(
            space.find_point(start.table),
            space.lower,
            space.upper,
            int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"),  # the same on every machine
            settings.population,
            settings.sigma,
            tolerance=0.5 / self.bounds.budget,  # half an entry: smaller steps change no budget
            categories=space.categories,
            value=start.value,
        )
        optimiser = create_optimiser(problem)
        optimiser.inject([space.find_point(table) for table in stage.inject])
        return optimiser

    # --- what candidates are worth --------------------------------------------------------------------------------

    def _measure(self, tables: Sequence[Ints], since: int, where: Sequence[str], rows: slice) -> list[float]:
        """Measure tables and add them to the pool, even if a limit is reached; return the values to minimise."""
        # What was measured before a limit counts: the error is raised again at the end.
        limit: LimitReachedError | None = None
        try:
            self.trials.measure(tables, since)
        except LimitReachedError as reached:
            limit = reached
        values = self.trials.values(tables)
        for table, value in zip(tables, values, strict=True):
            if math.isfinite(value):
                self._measured[table.tobytes()] = value
        fitting = list(values)
        if self.settings.parity:  # the paper's have the cache term of the layers that a stage varies in them
            for place, (table, value) in enumerate(zip(tables, values, strict=True)):
                score = -value if self.settings.objective == "metric" else loss_score(value)
                cache = cache_score(float(table[rows].mean()), self.bounds.budget, self.settings.gamma)
                fitting[place] = -fitness(score, cache, self.settings.lam)
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
        """Do the last step of EvolKV: scale the best group state to the total.

        So are the next best, to be shown beside it; all are measured by the objective alone.
        """
        state = [] if self._state is None else [self._state]
        known = {table.tobytes() for table in self.starts.values()}
        known |= {candidate.table.tobytes() for candidate in state}
        others = [candidate for candidate in self.outcome.pool if candidate.table.tobytes() not in known]
        searched = [*state, *others][: self.settings.finalists]
        completed = []
        for candidate in searched:
            # A group state may be above the caps, which the paper does not have.
            bounds = replace(self.bounds, caps=np.maximum(self.bounds.caps, candidate.table))
            completed.append(bounds.complete(candidate.table))
        tables = [*self.starts.values(), *completed]
        with suppress(LimitReachedError):
            self.trials.measure(tables, self.log.begin(self.name + COMPLETED))
        where = [f"start {name}" for name in self.starts]
        where += [f"{candidate.where}, {COMPLETED}" for candidate in searched]
        values = [value if math.isfinite(value) else math.inf for value in self.trials.values(tables)]
        candidates = list(map(Candidate, tables, values, where))
        first = candidates[len(self.starts) :][: len(state)]
        rest = [candidate for candidate in candidates if candidate not in first]
        self.outcome.pool = [*first, *sorted(rest, key=by_value)]
        self.outcome.result = None if self.outcome.flat else next(iter(first), None)


def penalise_failures(values: Iterable[float]) -> float:
    """Return the penalty value of failed candidates: worse than all finite `values` of their generation.

    The distance is the spread of the finite values, but at least 1 and at least the size of the largest: enough for any
    optimiser to turn away, not so much that a fitted surface has nothing else in it.
    """
    finite = [value for value in values if math.isfinite(value)]
    largest = max(finite)
    smallest = min(finite)
    return min(largest + max(largest - smallest, abs(largest), 1.0), sys.float_info.max)


def cache_score(mean: float, budget: float, gamma: float = 0.2) -> float:
    """Return how well a mean budget keeps to the target c, in [0, 1] (Eq. 2).

    max(0, 1 - (mean - c) / c) above c, and 1 - gamma * (1 - mean / c) up to it.

    Args:
        mean: average entries per kv head of the layers that are being searched, as in Algorithm 1; Eq. 2 defines the
            mean over the whole model, the paper is of two minds.
        budget: c, entries per kv head.
        gamma: discount for what is left unused, (0, 1].
    """
    if mean > budget:
        return max(0.0, 1 - (mean - budget) / budget)
    return 1 - gamma * (1 - mean / budget)


def fitness(score: float, cache: float, lam: float = 0.3) -> float:
    """Return the fitness of a candidate, larger is better: score * (1 + lam * cache) (Eq. 1; Algorithm 1, line 13).

    Args:
        score: f, 0 or more, larger is better; see `loss_score` for losses. NaN, of a candidate that failed, stays NaN.
        cache: `cache_score`, in [0, 1].
        lam: weight of the cache term, 0 or more; 0 ranks by the score alone.
    """
    return score * (1 + lam * cache)


def loss_score(loss: float) -> float:
    """Return exp(-loss), the score of a loss in nats per token: larger is better, positive. NaN stays NaN."""
    return math.exp(-loss)
