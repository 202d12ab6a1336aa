"""Searches of `kvsearch evolve` and `kvsearch run`: how they are opened, and the refinement of a run.

A refinement is `evolve --space joint` without its choice: policies of layers and budgets are searched on, from the best
plan that was solved. What is found is a candidate beside others, and a run chooses by itself. The contexts are of split
train, and none that a ranking was fitted or a curve measured on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsearch.commands.reporter import Reporter, StageReporter, on_interruption
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.items import Progress
from kvsearch.evaluation.compare import Split, estimate_replies
from kvsearch.evaluation.runner import describe_environment, find_metric_name, hash_rows
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import StageCost, Work
from kvsearch.plan import Plan, Size, load_plan, save_plan
from kvsearch.plan.arithmetic import scale
from kvsearch.plan.origin import ContextRecord
from kvsearch.policies.registry import build_policy
from kvsearch.runs.identity import BEST, CONFIG, CONTEXTS, RunConfig
from kvsearch.runs.run import (
    Run,
    lock_for_writing,
    read_sums,
    require_same,
    require_unchanged,
    write_contexts,
    write_json,
)
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.replay.forced_answers import forced_answers
from kvsearch.search.bank.prepared import resolve_policies
from kvsearch.search.evaluators import make_executor
from kvsearch.search.evolve import PreparedSearch, prepare_searches
from kvsearch.search.loop import SearchOutcome
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.start_plans import RESERVED_NAMES, SearchSetup
from kvsearch.search.trials import START_PLANS, Candidate, Executor, TrialLog
from kvsearch.selection.joint import PolicyCurves
from kvsearch.tasks.encode import TaskPrompts
from kvsearch.tasks.metrics import is_forced

SEARCHED = "searched_sha256"  # questions and what is teacher-forced, where replies decide them
REFINED = "refined"
SEARCHED_TOKENS = 1_600  # questions and right replies that a candidate reads at most, about
MIN_SEARCHED_CONTEXTS = 16  # contexts, whatever they take
READ_SHARE = 0.1  # of the rest of a refinement that own replies take in the progress, and then the reading of prompts
MAX_CANDIDATES = 2  # plans of a size that become candidates: there are few places among the finalists


# --- opening ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_search(
    directory: Path,
    config: RunConfig,
    searches: tuple[PreparedSearch, ...],
    files: Sequence[str],
    reporter: Reporter,
    *,
    force: bool = False,
    workers: int | None = None,
) -> Iterator[tuple[tuple[PreparedSearch, ...], Executor, Run, TrialLog]]:
    """Decide what is teacher-forced, read the prompts, and open the directory: all that comes before candidates.

    The `config` is completed with the content of the searches. `files` are patterns of what is written there, see
    `Run.open`. `workers` is how many each read the prompts.

    Raises:
        UsageError: another search is in the directory; see also `Run.open`.
        EnvironmentFault, IncompatibleError: see `make_executor`.
    """
    if not force:
        require_same(directory, config.changed(content=describe_searches(searches)), unknown=(SEARCHED,))
    searches = _decide_answers(searches, reporter)
    config = config.changed(content=describe_searches(searches))
    # who evaluates comes first: with --force the old run is gone only once the new one can begin
    with (
        _make_executor(searches, workers, reporter) as executor,
        Run.open(directory, config, force=force, files=files) as run,
        run.open_ledger(TrialLog) as log,
    ):
        yield searches, executor, run, log


def _decide_answers(searches: Sequence[PreparedSearch], reporter: Reporter) -> tuple[PreparedSearch, ...]:
    """Decide what is teacher-forced after the questions, which all searches share."""
    first = searches[0]
    if not first.needs_replies:
        return tuple(searches)
    settings = first.settings
    with reporter.progress("own replies: context") as progress:
        answers = forced_answers(
            first.setup.loaded, first.encoded["search"], settings.protocol, settings.answers, progress
        )
    count = sum(answer.own for answer in answers.values())
    reporter.say(
        f"the model's own reply is right and teacher-forced after {count} of {len(answers)} questions, the right "
        "answer after the others"
    )
    return tuple(replace(search, answers=answers) for search in searches)


def describe_searches(searches: Sequence[PreparedSearch]) -> dict[str, Any]:
    """Return all settings that decide the result, as JSON."""
    first = searches[0]
    return {
        **describe_environment(first.setup.loaded),
        "settings": first.as_json(),
        "budgets": [search.budget for search in searches],
        "policies": [{"name": policy.name, "params": policy.parameters()} for policy in first.setup.policies],
        "starts": [{name: table.tolist() for name, table in search.starts.items()} for search in searches],
        "asked": {
            "samples": {name: split.samples for name, split in first.splits.items()},
            "max_length": first.search_split.max_length,
        },
        "metrics": {task.task.name: find_metric_name(task.task) for task in first.encoded["search"]},
        "splits": {name: {task.task.name: hash_rows(task) for task in split} for name, split in first.encoded.items()},
        **({} if first.kept is None and first.answers is None else {SEARCHED: first.data_sha256}),
    }


def _make_executor(searches: Sequence[PreparedSearch], workers: int | None, reporter: Reporter) -> Executor:
    """Make the executor of candidates, which reads the prompts."""
    first = searches[0]
    who = "" if workers is None else f" by each of {workers} workers"
    if first.setup.evicts_prompts_only:
        reporter.say(f"reading {len(first.samples)} questions once for all candidates{who}")
    else:
        reporter.say(
            f"every candidate is run whole on {len(first.samples)} questions{who}: budgets of the decode phase"
        )
    cap = max(search.cap for search in searches)
    with reporter.progress("reading: prompt") as progress:
        return make_executor(first, cap, progress)


# --- progress of a search -----------------------------------------------------------------------------------------


class SearchProgress:
    """Shows the progress of a search of at most `max_candidates`; a `Watcher`."""

    def __init__(self, reporter: Reporter, log: TrialLog, max_candidates: int) -> None:
        self.reporter = reporter
        self.log = log
        self.max_candidates = max_candidates
        self.title = self.place = "search"
        self.failures = 0
        self.starts = math.nan
        self._open = ExitStack()
        self._show: Progress | None = None

    def stage(self, name: str) -> None:
        self.place = f"search, {name}"

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        self.failures += sum(not math.isfinite(value) for value in values)
        if stage == START_PLANS:
            self.starts = best.value
        place = self.place if stage == START_PLANS else f"{self.place}, generation {generation}"
        failed = f", {self.failures} failed" if self.failures else ""
        self.title = f"{place}, best {best.value:.6g} (best start {self.starts:.6g}){failed}"
        if self._show is None:
            self._show = self._open.enter_context(self.reporter.progress(lambda: self.title))
        self._show(min(self.log.evaluations, self.max_candidates), self.max_candidates)

    def ended(self, why: str) -> None:
        self.close()
        self.reporter.say(f"search ended: {why}")

    def close(self) -> None:
        """Close the progress display."""
        self._open.close()
        self._show = None


@contextmanager
def search_progress(reporter: Reporter, log: TrialLog, max_candidates: int) -> Iterator[SearchProgress]:
    """Show the progress of a search; after Ctrl-C write and report the best so far, and how to resume."""
    watcher = SearchProgress(reporter, log, max_candidates)
    directory = log.path.parent

    def words() -> str:
        watcher.close()
        if (best := log.best) is not None:
            write_json(directory / BEST, {"value": best.value, "where": best.where, "budgets": best.candidate})
            reporter.say(f"best so far: {best.value:.6g} ({best.where}), in {directory / BEST}")
        return f"give the same command again to go on: what was measured is in {directory}"

    with closing(watcher), on_interruption(reporter, words):
        yield watcher


# --- the refinement of a run -----------------------------------------------------------------------------------------


def limit_search(split: Split, loaded: LoadedModel) -> Split:
    """Limit a split so that a candidate reads about `SEARCHED_TOKENS` after its prompts.

    Questions about one context are alike, so first there are fewer of each, and fewer contexts only then.
    """
    encoded = split.encode(loaded)
    contexts = sum(len(task.prompts) for task in encoded)
    asked_tokens = [tokens for task in encoded for tokens in count_following(task)]
    affordable = SEARCHED_TOKENS * len(asked_tokens) / sum(asked_tokens)  # questions
    if affordable >= len(asked_tokens):
        return split
    left = min(contexts, max(MIN_SEARCHED_CONTEXTS, round(affordable)))
    samples = -(-split.samples * left // contexts)
    return replace(split, samples=samples, questions=max(1, round(affordable / left)))


def count_following(task: TaskPrompts) -> list[int]:
    """Count the tokens of every question with its right reply."""
    return [len(question.ids) + len(question.right) for prompt in task.prompts for question in prompt.questions]


# what was found, by size and name, and what it was searched on
RefinedPlans = tuple[Mapping[Size, Mapping[str, Plan]], ContextRecord]


@dataclass(frozen=True, eq=False)
class Refinement:
    """A search that refines solved plans, at sizes that share their questions.

    Args:
        loaded: the model.
        settings: how to search.
        output: where what was measured is kept, so that the same call goes on where it was killed.
        config: of the run of the search, still without the content of its searches.
        searched: what is searched on.
    """

    loaded: LoadedModel
    settings: EvolveSettings
    output: Path
    config: RunConfig
    searched: Split

    def estimate_cost(self, name: str, sizes: int) -> StageCost:
        """Estimate the cost at so many sizes, as a stage: own replies, prompts once, then candidates."""
        model = self.loaded.model
        encoded = self.searched.encode(self.loaded)
        replied = [task for task in encoded if not is_forced(task.task)]
        replies = estimate_replies(model, name, replied, self.searched, [make_full_program(model)])
        prompts = [prompt for task in encoded for prompt in task.prompts]
        following = [tokens for task in encoded for tokens in count_following(task)]
        read = Work.over(len(prompt.context) for prompt in prompts)
        candidates = Work(tokens=sizes * self.settings.generations * sum(following))
        contexts = sum(task.coverage.contexts for task in encoded)
        return StageCost(name, contexts, len(following), replies.work + read + candidates)

    def run(
        self, calibrated: PolicyCurves, starts: Mapping[Size, Mapping[str, Plan]], stage: StageReporter
    ) -> RefinedPlans | None:
        """Refine the plans of every size by search, and return the plans that are better than all of them.

        None, with a warning, where that cannot be done: a run has other candidates. What is finished is only read.

        Raises:
            UsageError: another search is in the directory, or a plan there was changed; see also `open_search`.
            EnvironmentFault, IncompatibleError: see `Search.run` and `open_search`.
        """
        try:
            searches = self._prepare(calibrated, starts)
        except (UsageError, IncompatibleError) as error:
            stage.warn(f"nothing is searched on: {error}")
            return None
        with lock_for_writing(self.output):
            if CONFIG in read_sums(self.output):
                config = self.config.changed(content=describe_searches(searches))
                require_same(self.output, config, unknown=(SEARCHED,))
            else:
                self._search(searches, stage)
        plans = {size: _read_plans(self.output, size) for size in starts}
        return plans, searches[0].record(searched=True)

    def _prepare(
        self, calibrated: PolicyCurves, starts: Mapping[Size, Mapping[str, Plan]]
    ) -> tuple[PreparedSearch, ...]:
        """Prepare a search for every size from its `starts`, among the policies that were measured."""
        setup = SearchSetup.with_choices(self.loaded, [build_policy(spec) for spec in calibrated.policies])
        resolve_policies(self.loaded.model, setup.policies_by_layer)  # told before prompts are read
        named = {
            _count_budget(size): {name: plan for name, plan in solved.items() if name not in RESERVED_NAMES}
            for size, solved in starts.items()
        }
        return prepare_searches(setup, named, self.settings, {"search": self.searched}, calibrated.contexts)

    def _search(self, searches: tuple[PreparedSearch, ...], stage: StageReporter) -> None:
        """Search at every budget, and write the best plans."""
        files = (CONTEXTS, "plan-*.json")
        maximum = self.settings.generations * len(searches)
        stage.part = READ_SHARE
        opening = open_search(self.output, self.config, searches, files, stage)
        with opening as (searches, executor, run, log), closing(SearchProgress(stage, log, maximum)) as watcher:
            stage.part = 1.0
            write_contexts(self.output, {"fitted": searches[0].hashes["fitted"]})
            for number, search in enumerate(searches, 1):
                allowed = number * self.settings.generations  # one log has all searches
                outcome = search.search(executor, log, allowed, watcher, f"budget {search.budget}: ")
                for rank, candidate in enumerate(_find_better(search, outcome), 1):
                    origin = {**search.as_json(), "found": candidate.where, "value": candidate.value}
                    plan = search.plan(candidate.table, origin, search.record(searched=True))
                    save_plan(plan, self.output / f"plan-{search.budget}-{rank}.json", overwrite=True)
            run.finish()


def _find_better(search: PreparedSearch, outcome: SearchOutcome) -> list[Candidate]:
    """Find the best candidates that are better than all start plans."""
    if outcome.flat:
        return []
    value_of_table = {candidate.table.tobytes(): candidate.value for candidate in outcome.pool}
    best_start = min(
        (value_of_table.get(table.tobytes(), math.inf) for table in search.starts.values()), default=math.inf
    )
    return [candidate for candidate in outcome.pool if candidate.value < best_start][:MAX_CANDIDATES]


def _read_plans(directory: Path, size: Size) -> dict[str, Plan]:
    """Read the refined plans of a size, by their names as candidates; plans of a ratio follow the prompt."""
    plans = {}
    for number, path in enumerate(sorted(directory.glob(f"plan-{_count_budget(size)}-*.json")), 1):
        require_unchanged(directory, path.name, "restore it, or delete the directory and repeat the command")
        plan = load_plan(path)
        if size.ratio is not None:
            plan = scale(plan, ratio=size.ratio, length=size.length)
        plans[REFINED if number == 1 else f"{REFINED}#{number}"] = plan
    return plans


def _count_budget(size: Size) -> int:
    """Compute the entries per kv head of a size that has a length."""
    assert size.length is not None
    return round(size.mean(size.length))
