"""The refinement of `kvsearch run`: policies of layers and budgets are searched on, from the best plan that was solved.

`evolve --space joint` without its choice: what is found is a candidate beside others, and a run chooses by itself. The
contexts are of split train, and none that a ranking was fitted or a curve measured on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.progress import Progress
from kvsearch.jobs.evolve import SEARCHED, describe_searches, open_search
from kvsearch.jobs.reporter import Reporter
from kvsearch.plan import load_plan, save_plan
from kvsearch.plan.arithmetic import scale
from kvsearch.policies.registry import policy_of
from kvsearch.runs.contexts import write_contexts
from kvsearch.runs.identity import CONFIG, CONTEXTS, RunConfig
from kvsearch.runs.run import read_sums, require_same, require_unchanged
from kvsearch.search.settings import EvolveSettings, SearchLimits

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Settings
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan, Size
    from kvsearch.plan.origin import ContextRecord
    from kvsearch.search.candidates import Candidate, SearchOutcome
    from kvsearch.search.evolve import PreparedSearch
    from kvsearch.search.loop import StageProgress
    from kvsearch.search.trials import TrialLog
    from kvsearch.selection.candidates import CalibratedPolicies
    from kvsearch.tasks.base import Task

NAME = "refined"
MAX_CANDIDATES = 2  # plans of a size that become candidates: there are few places among the finalists


@dataclass(frozen=True)
class RefinedPlans:
    """Plans that were found, by budget and name, and what they were searched on."""

    plans: Mapping[int, Mapping[str, Plan]]
    contexts: ContextRecord

    def candidates(self, size: Size) -> dict[str, Plan]:
        """Return the plans of a size that has a length; those of a ratio follow the prompt at hand."""
        plans = self.plans[_budget(size)]
        if size.ratio is None:
            return dict(plans)
        return {name: scale(plan, ratio=size.ratio, length=size.length) for name, plan in plans.items()}


@dataclass(frozen=True)
class _CandidateProgress:
    """A `Watcher` that shows how many of `most` candidates were evaluated."""

    log: TrialLog
    most: int
    progress: Progress

    def stage(self, name: str, part: StageProgress | None = None) -> None:
        """Show nothing: stages are not told apart."""

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:  # noqa: ARG002
        """Show the candidates so far."""
        self.progress(min(self.log.spent.evaluations, self.most), self.most)

    def ended(self, why: str) -> None:
        """Show nothing: the run goes on."""


@dataclass(frozen=True, eq=False)
class Refinement:
    """A search that goes on from plans that were solved, of sizes that share their questions.

    Args:
        loaded: the model.
        directory: of the search: it keeps what was measured, so the same call goes on where it was killed.
        config: of the run that is kept there, still without the content of its searches.
        settings: how to search.
        asked: how the tasks are asked.
        tasks: what is searched on.
        evaluations: candidates at each size.
    """

    loaded: LoadedModel
    directory: Path
    config: RunConfig
    settings: EvolveSettings
    asked: Settings
    tasks: Sequence[Task]
    evaluations: int

    def run(
        self, calibrated: CalibratedPolicies, starts: Mapping[Size, Mapping[str, Plan]], reporter: Reporter
    ) -> RefinedPlans | None:
        """Search on from the plans of every size, by name, and return what is better than all of these.

        None, with a warning, where that cannot be done: a run has other candidates. What is finished is only read.

        Raises:
            UsageError: another search is in the directory, or a plan there was changed; see also `open_search`.
            EnvironmentFault, IncompatibleError: see `Search.run` and `open_search`.
        """
        try:
            searches = self._prepare(calibrated, starts)
        except (UsageError, IncompatibleError) as error:
            reporter.warn(f"nothing is searched on: {error}")
            return None
        if CONFIG in read_sums(self.directory):
            config = self.config.changed(content=describe_searches(searches))
            require_same(self.directory, config, unknown=(SEARCHED,))
        else:
            self._search(searches, reporter)
        plans = {search.budget: _read_plans(self.directory, search.budget) for search in searches}
        return RefinedPlans(plans, searches[0].record(searched=True))

    def _prepare(
        self, calibrated: CalibratedPolicies, starts: Mapping[Size, Mapping[str, Plan]]
    ) -> tuple[PreparedSearch, ...]:
        """Prepare a search for every size from its `starts`, among the policies that were measured."""
        from kvsearch.search.bank.prepared import ranking_policies
        from kvsearch.search.evolve import Splits, prepare_search, resize_search
        from kvsearch.search.start_plans import RESERVED, Base

        base = Base.choosing(self.loaded, [policy_of(spec) for spec in calibrated.curves.policies])
        ranking_policies(self.loaded.model, base.by_layer)  # told before prompts are read
        (budget, plans), *others = (
            (_budget(size), {name: plan for name, plan in solved.items() if name not in RESERVED})
            for size, solved in starts.items()
        )
        splits = Splits(self.tasks, (), ())
        first = prepare_search(base, budget, self.settings, splits, self.asked, plans, calibrated.contexts)
        return (first, *(resize_search(first, budget, plans) for budget, plans in others))

    def _search(self, searches: tuple[PreparedSearch, ...], reporter: Reporter) -> None:
        """Search at every budget, and write the best plans."""
        files = (CONTEXTS, "plan-*.json")
        with (
            open_search(self.directory, self.config, searches, files, reporter) as (ready, executor, run, log),
            reporter.progress("candidates") as progress,
        ):
            write_contexts(self.directory, {"fitted": ready[0].hashes["fitted"]})
            watcher = _CandidateProgress(log, self.evaluations * len(ready), progress)
            for number, search in enumerate(ready, 1):
                limits = SearchLimits(evaluations=number * self.evaluations)  # one log has all searches
                outcome = search.search(executor, log, limits, watcher, f"budget {search.budget}: ")
                for rank, candidate in enumerate(_find_better(search, outcome), 1):
                    origin = {**search.as_json(), "found": candidate.where, "value": candidate.value}
                    plan = search.plan(candidate.table, origin, search.record(searched=True))
                    save_plan(plan, self.directory / f"plan-{search.budget}-{rank}.json", overwrite=True)
            run.finish()


def _find_better(search: PreparedSearch, outcome: SearchOutcome) -> list[Candidate]:
    """Return the best candidates that are worth more than all starts."""
    if outcome.flat:
        return []
    known = {candidate.table.tobytes(): candidate.value for candidate in outcome.pool}
    least = min((known.get(table.tobytes(), math.inf) for table in search.starts.values()), default=math.inf)
    return [candidate for candidate in outcome.pool if candidate.value < least][:MAX_CANDIDATES]


def _read_plans(directory: Path, budget: int) -> dict[str, Plan]:
    """Return the plans that were found at a budget, by their names as candidates."""
    plans = {}
    for number, path in enumerate(sorted(directory.glob(f"plan-{budget}-*.json")), 1):
        require_unchanged(directory, path.name, "restore it, or delete the directory and repeat the command")
        plans[NAME if number == 1 else f"{NAME}#{number}"] = load_plan(path)
    return plans


def _budget(size: Size) -> int:
    """Return the entries per kv head of a size that has a length."""
    assert size.length is not None
    return round(size.mean(size.length))
