"""kvsearch evolve: search the budgets on a task, pick on held-out questions, report on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvsearch.calibration.options import ANSWERS_OPTION
from kvsearch.commands.groups import (
    BUDGET,
    BUDGETS,
    MODEL,
    PROTOCOL,
    BudgetList,
    ModelOptions,
    RunDirOptions,
    SelectionOptions,
    TaskOptions,
    WorkerOptions,
    suggest_plan_commands,
)
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.plan import load_checked_plan
from kvsearch.commands.public import job
from kvsearch.commands.reporter import FINISHED_NOTE, Reporter, make_stage_store, warn_about_coverage
from kvsearch.config.options import RULE, Option, Params, Repeated, drop_alternatives, merge_params, option
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Entries
from kvsearch.core.limits import MOST_NUMBER
from kvsearch.core.naming import check_unique
from kvsearch.plan import save_plan
from kvsearch.plan.schema import PHASES, QUESTION_AGNOSTIC, Protocol
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.policies.registry import build_policy
from kvsearch.report.costs import Forecast
from kvsearch.report.search import describe_decisions, make_search_result
from kvsearch.runs.identity import BEST, CONFIG, CONTEXTS, PLAN, REPORT, RunConfig
from kvsearch.runs.run import read_run, write_contexts
from kvsearch.search.settings import EvolveSettings
from kvsearch.tasks.metrics import is_forced

if TYPE_CHECKING:
    from kvsearch.plan import Plan
    from kvsearch.policies import Policy
    from kvsearch.results.search import SearchResult
    from kvsearch.search.evolve import PreparedSearch

SEARCH_PANEL, LIMITS = "What is searched", "When to stop"
DEFAULT_POLICY = "snapkv"
SPLIT_OF_USE = {"search": "train", "choice": "select", "report": "report"}
SEARCH_FILES = (BEST, REPORT, PLAN, CONTEXTS, "plan-*.json", "choice", "choice-*", "report")


SEARCH_SETTINGS: dict[str, Option] = {
    "space": Option(
        "groups: one group of layers after the other; layers: all at once; heads: multipliers around the first "
        "--start; joint: the policy of every layer, of those of the --start plans and --policy, and multipliers "
        "around the best start."
    ),
    "phases": Option(
        "When to evict: prefill, decode or both, each phase with the budget as its size. Prefill candidates share "
        "one reading of every prompt; with decode each is run whole, exact and slower."
    ),
    "group_size": Option("Layers of a group.", shown="8, or all"),
    "objective": Option(
        "What the search lowers or raises: nll of teacher-forced answers (cheap), or metric, the task's own of "
        "free replies. The best are judged by the metric in any case."
    ),
    "answers": ANSWERS_OPTION,
    "generations": Option("Of each group."),
    "population": Option("Of each generation.", shown="4 + 3 ln dimension"),
    "sigma": Option("First step, in units of the budget."),
    "parity": Option("The paper's literal choices (soft total, cache term)."),
    "lam": Option("With --parity: weight of the cache term (Eq. 1).", flag="--lambda"),
    "gamma": Option("With --parity: penalty for unused budget in the cache term (Eq. 2)."),
    "hard_below": Option(
        "Search only on questions that the full cache answers right and that score below so many percent under "
        "even budgets (the paper's needles: 60).",
        metavar="PERCENT",
        shown="all questions",
    ),
    "hard_most": Option("With --hard-below: at most so many of them (the paper's needles: 35).", shown="all"),
    "finalists": Option("Candidates that are judged by the metric at the end."),
}  # the flags of `EvolveSettings`


class EvolveOptions(ModelOptions, WorkerOptions, RunDirOptions, TaskOptions, SelectionOptions, EvolveSettings):
    """Options of `evolve`: policies, sizes, questions, limits and workers."""

    job: ClassVar[str] = "evolve"
    recipes: ClassVar[bool] = True
    alternatives: ClassVar[tuple[str, ...]] = ("budget", "budgets")
    panel: ClassVar[str] = SEARCH_PANEL
    flags: ClassVar[Mapping[str, Option]] = SEARCH_SETTINGS

    model: str = option(..., MODEL)
    budget: Entries | None = option(None, BUDGET)
    budgets: BudgetList = option(None, BUDGETS)
    start: Annotated[tuple[Path, ...], Repeated] = option(
        (),
        "A plan to start from; repeatable. The policies of the first one are searched, unless --policy is given.",
        RULE,
        repeated=True,
    )
    policy: str | None = option(
        None,
        "Eviction policy of all layers; joint: more that a layer may have, joined by commas.",
        RULE,
        shown="snapkv, or those of the first --start",
        completes="kvsearch.policies.registry:list_policy_names",
    )
    params: Params = option({}, "A policy parameter, as in --set window=16; repeatable.", flag="--set", repeated=True)
    max_evals: int | None = option(None, "Different candidates.", RULE, panel=LIMITS, ge=1)
    protocol: Protocol = option(QUESTION_AGNOSTIC, PROTOCOL)
    method: Literal["evolkv"] = "evolkv"

    @classmethod
    def merge(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Merge options; a single size replaces several, parameters are added to the policy's."""
        if "lambda" in stated:
            stated["lam"] = stated.pop("lambda")
        stated = drop_alternatives(stated, given, cls.alternatives)
        return merge_params(stated, given, stated.get("policy") or DEFAULT_POLICY)

    def to_recipe(self) -> dict[str, Any]:
        """Return the options for config.json, without a default group size, so that it suits other models."""
        stated = "group_size" in self.model_fields_set
        return {key: value for key, value in super().to_recipe().items() if stated or key != "group_size"}

    def settings(self) -> EvolveSettings:
        """Return what decides the search itself; a group size that is not given stays open."""
        given = EvolveSettings.model_fields.keys() & self.model_fields_set
        return EvolveSettings(**{name: getattr(self, name) for name in given})

    def plan_file(self, budget: int) -> Path:
        """Return the path of the plan of a budget."""
        return self.output / (PLAN if self.budgets is None else f"plan-{budget}.json")

    def count_candidates(self, searches: Sequence[PreparedSearch]) -> int:
        """Return the maximum number of evaluated candidates."""
        return min(sum(search.maximum_candidates for search in searches), self.max_evals or MOST_NUMBER)

    @property
    def config(self) -> RunConfig:
        """The configuration of the run, still without the content of its searches, see `describe_searches`."""
        execution = {"max_evals": self.max_evals, "workers": self.workers, "ray_address": self.ray_address}
        return RunConfig(job="evolve", options=self.to_recipe(), content={}, execution=execution)


def remarks(options: EvolveOptions, result: SearchResult) -> Iterator[str]:
    """Yield the choice with its reason, the work it took, and its files."""
    yield from describe_decisions(result)
    files = [options.plan_file(budget) for budget in result.found]
    yield f"{result.evaluations} candidates, {result.tokens:,} tokens; wrote {', '.join(map(str, files))}"
    yield from suggest_plan_commands(files[0], options.model, options)


def dry_run(options: EvolveOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast `evolve`; errors as `evolve` before the search."""
    searches = _prepare(options, reporter, models)
    from kvsearch.commands.searching import describe_searches

    first = searches[0]
    candidates = options.count_candidates(searches)
    content = {
        **describe_searches(searches),
        "measured_by": "stored prompts" if first.setup.evicts_prompts_only else "whole runs",
        "most_candidates": candidates,
    }
    decisions = [cost for search in searches for cost in search.decision_costs()]
    return Forecast(content, [*first.search_costs(candidates), *decisions], first.setup.loaded.model)


@job(EvolveOptions)
def evolve(options: EvolveOptions, reporter: Reporter, models: ModelLoader) -> SearchResult:
    """Search the budgets that serve a task best, at an exact total; a start plan is kept unless one found beats it.

    Searched on split train, chosen on split select, reported on split report, on contexts that no start plan was fitted
    or chosen on. What is found is written if its lead over the best start plan on split select is beyond chance, or
    with `parity` whatever it scores. Writes plan.json, report.json and a
    ledger to the directory `output`; the same call goes on with an interrupted search, and of a finished one it repeats
    the result.

    Raises:
        UsageError: options, tasks and start plans that do not go together, or a directory that is in use.
        IncompatibleError: start plans of another model, a model that gives no finite values, or one whose full cache
            scores next to nothing.
        EnvironmentFault: Ray is missing, the disk is full, or more than half of a generation failed.
    """
    directory = options.output
    config = options.config
    force = options.force
    searches = _prepare(options, reporter, models)
    from kvsearch.commands.searching import open_search, search_progress
    from kvsearch.search.evolve import keep_hard_questions, run_searches

    if force or not (directory / CONFIG).exists():
        with reporter.progress("asking the full cache: context") as progress:
            searches[0].require_answers(progress)
    if options.hard_below is not None:
        with reporter.progress("finding out how hard questions are: context") as progress:
            searches, message = keep_hard_questions(searches, progress)
        reporter.say(message)
    store = make_stage_store(directory, lambda evaluation: evaluation.config(), reporter, force=True)
    opening = open_search(directory, config, searches, SEARCH_FILES, reporter, force=force, workers=options.workers)
    with (
        opening as (searches, executor, run, log),
        search_progress(reporter, log, options.count_candidates(searches)) as watcher,
    ):
        lines_before = log.count
        write_contexts(directory, searches[0].hashes)
        finished = run_searches(searches, executor, log, options.max_evals, watcher, store)
        result = make_search_result(finished, log.evaluations, log.tokens)
        for evolved in finished:
            save_plan(evolved.choice.plan, options.plan_file(evolved.search.budget), overwrite=True)
        run.write(REPORT, result.as_json())
        run.finish()
        if run.state == "finished" and log.count == lines_before:
            reporter.say(FINISHED_NOTE)
        return result


def _prepare(options: EvolveOptions, reporter: Reporter, models: ModelLoader) -> tuple[PreparedSearch, ...]:
    """Check all options before the model is loaded, load it, and prepare a search for each budget."""
    budgets = (options.budgets or ()) if options.budget is None else (options.budget,)
    if not budgets:
        raise UsageError("how many entries may a kv head keep on average? Give --budget, or several with --budgets")
    tasks = {name: options.find_tasks(options.model, name) for name in SPLIT_OF_USE.values()}
    if options.objective == "metric" and any(map(is_forced, tasks["train"])):
        raise UsageError("--objective metric judges replies, and nothing replies to a text (ppl:FILE): leave it out")
    read_run(options.output, "evolve")
    plans = {path.stem: load_checked_plan(path) for path in options.start}
    from kvsearch.search.evolve import prepare_searches
    from kvsearch.search.start_plans import SearchSetup, check_start_names

    names = [path.stem for path in options.start]
    check_start_names(names)
    check_unique("start plan", names)
    policies = _find_policies(options.space, options.policy, options.params, plans)
    for name, plan in plans.items():
        if plan.provenance.contexts is None or not plan.provenance.contexts.complete:
            reporter.warn(
                f"start plan {name} does not say what it was fitted and chosen on, or not all of it: it may have seen "
                "questions of this search"
            )
    loaded = models.load(options.model)
    if options.space == "joint":
        setup = SearchSetup.with_choices(loaded, policies)
    else:
        setup = SearchSetup.of(loaded, policies[0] if policies else next(iter(plans.values())), PHASES[options.phases])
    splits = {use: options.split(name, tasks[name], options.protocol) for use, name in SPLIT_OF_USE.items()}
    searches = prepare_searches(
        setup, dict.fromkeys(sorted(budgets), plans), options.settings(), splits, rule=options.rule
    )
    if options.samples is not None:
        warn_about_coverage(reporter, [task for encoded in searches[0].encoded.values() for task in encoded])
    return searches


def _find_policies(space: str, names: str | None, params: Mapping[str, Any], plans: Mapping[str, Plan]) -> list[Policy]:
    """Find the policy of all layers, or the choices of a layer; empty if the start plan decides."""
    if space == "joint":
        if not plans:
            raise UsageError("space joint begins with the policies of a plan: give one with --start")
        known = [build_policy(spec) for plan in plans.values() for spec in plan.policies]
        named = [parse_policy(name) for name in (names or "").split(",") if name]
        return [*known, *(create_policy(name, {**fitted, **params}) for name, fitted in named)]
    if names is None and plans:
        if params:
            raise UsageError("--set is for a --policy: the policies of --start plans have their own parameters")
        return []
    name, fitted = parse_policy(names or DEFAULT_POLICY)
    policy = create_policy(name, {**fitted, **params})
    if policy.keeps_all(1, 2):  # even a head whose budget is below the length
        raise UsageError(f"--policy {name} never evicts, so that no budget matters: search another policy")
    return [policy]
