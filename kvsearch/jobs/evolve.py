"""kvsearch evolve: search the budgets on a task, choose on fresh questions, report on others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvsearch.config.options import Option, Params, Repeated, one_of, with_params
from kvsearch.errors import UsageError
from kvsearch.jobs.evolve_progress import watching
from kvsearch.jobs.following import evaluation, following
from kvsearch.jobs.foretell import foretold
from kvsearch.jobs.groups import (
    ASKED,
    BUDGET,
    DEFAULT_TASKS,
    TASKS,
    Asking,
    Numbers,
    TaskDetails,
    WithModel,
    WithRun,
    WithWorkers,
    default_tasks,
)
from kvsearch.jobs.public import job
from kvsearch.jobs.stages import FINISHED, kept_replies
from kvsearch.jobs.talk import Talk
from kvsearch.plan.fields import Entries, Samples, refuse
from kvsearch.plan.limits import MOST_NUMBER
from kvsearch.search.settings import WHAT, WORK, EvolveSettings, SearchLimits

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.plan_comparison import Keep, KeptStage
    from kvsearch.plan import Plan
    from kvsearch.policies import Policy
    from kvsearch.report.table import Table
    from kvsearch.runs.identity import RunConfig
    from kvsearch.search.evolve import Evolved, PreparedSearch
    from kvsearch.search.jobs import Executor
    from kvsearch.search.ledger import SearchRun, Spent
    from kvsearch.workers.cluster import RayWorkers

LIMITS = "When to stop"
DEFAULT_POLICY = "snapkv"
SPLITS = "train", "select", "report"
SEARCHED = "searched_sha256"  # questions and what is teacher-forced, where replies decide them


class EvolveOptions(WithModel, WithWorkers, WithRun, TaskDetails, Asking, EvolveSettings):
    """What is searched and at which size, on which questions, when to stop, and who does the work."""

    job: ClassVar[str] = "evolve"
    recipes: ClassVar[str | None] = "recipes/evolve"
    example: ClassVar[str] = "budget: 128"

    budget: Annotated[Entries | None, replace(BUDGET, panel=WHAT)] = None
    budgets: Annotated[
        tuple[Entries, ...] | None,
        Numbers,
        Option(
            "Several budgets in one run, each searched by itself; beside it the smallest one's plan, scaled. Writes "
            "plan-N.json and front.json.",
            metavar="N,N...",
            panel=WHAT,
        ),
    ] = None
    start: Annotated[
        tuple[Path, ...],
        Repeated,
        Option(
            "A plan to start from; repeatable. The policies of the first one are searched, unless --policy is given.",
            panel=WHAT,
            repeated=True,
        ),
    ] = ()
    policy: Annotated[
        str | None,
        Option(
            "Eviction policy of all layers; joint: more that a layer may have, joined by commas.",
            panel=WHAT,
            shown="snapkv, or those of the first --start",
        ),
    ] = None
    params: Annotated[
        Params,
        Option("A policy parameter, as in --set window=16; repeatable.", flag="--set", panel=WHAT, repeated=True),
    ] = Field(default_factory=dict)
    tasks: Annotated[
        str | None,
        Option(
            "KIND or KIND:NAME,NAME, several joined by +: synthetic, ruler, longbench, infinitebench, gsm8k, niah, "
            "jsonl:FILE; see `kvsearch tasks`.",
            metavar="SPEC",
            panel=TASKS,
            shown=DEFAULT_TASKS,
        ),
    ] = None
    samples: Annotated[Samples, Option("Contexts per task in each of the three splits.", panel=ASKED)] = 10
    max_evals: Annotated[int | None, Field(ge=1), Option("Different candidates.", panel=LIMITS)] = None
    max_time: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False), Option("Seconds of search, all sessions.", panel=LIMITS)
    ] = None
    max_tokens: Annotated[
        int | None, Field(ge=1, le=MOST_NUMBER), Option("Tokens read under candidates.", panel=LIMITS)
    ] = None
    job_timeout: Annotated[
        float | None,
        Option("Seconds after which the job of a Ray worker has failed.", panel=WORK, recorded=False),
    ] = None
    resume: Annotated[bool, Option("Go on with the run in the directory.", recorded=False)] = False
    method: Literal["evolkv"] = "evolkv"

    @model_validator(mode="after")
    def _one_size_or_several(self) -> EvolveOptions:
        if self.budget is not None and self.budgets is not None:
            refuse([(("budgets",), "is in place of budget: give one of them")])
        return self

    @classmethod
    def merged(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """See `JobOptions.merged`; a size takes the place of sizes, parameters are added to those of the policy."""
        for key, name in (("job", "together"), ("lambda", "lam")):
            if key in stated:
                stated[name] = stated.pop(key)
        stated = one_of(stated, given, ("budget", "budgets"))
        return with_params(stated, given, stated.get("policy") or DEFAULT_POLICY)

    def recorded(self) -> dict[str, Any]:
        """See `JobOptions.recorded`; a group size that nobody stated suits other models, too."""
        stated = "group_size" in self.model_fields_set
        return {key: value for key, value in super().recorded().items() if stated or key != "group_size"}

    @classmethod
    def _of_workers(cls) -> tuple[str, ...]:
        """See `WithWorkers`."""
        return (*super()._of_workers(), "job_timeout")

    def ray_workers(self) -> RayWorkers | None:
        """See `WithWorkers.ray_workers`."""
        wanted = super().ray_workers()
        return None if wanted is None else replace(wanted, job_timeout=self.job_timeout)

    @property
    def limits(self) -> SearchLimits:
        """Where the search stops."""
        return SearchLimits(self.max_evals, self.max_time, self.max_tokens)


@dataclass(frozen=True, eq=False)
class Evolution:
    """A finished search: what was found at each budget, and what it took."""

    options: EvolveOptions
    found: list[Evolved]
    spent: Spent

    @property
    def is_front(self) -> bool:
        """Whether several budgets were asked for."""
        return self.options.budgets is not None

    @property
    def plans(self) -> dict[int, Plan]:
        """The plan that was chosen, by budget."""
        return {one.budget: one.choice.plan for one in self.found}

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found."""
        from kvsearch.report.search import as_json, front_as_json

        return front_as_json(self.found, self.spent) if self.is_front else as_json(self.found[0], self.spent)

    def tables(self) -> list[Table]:
        """Return what was found as tables."""
        from kvsearch.report.files.search import read_search
        from kvsearch.report.search import tables

        return tables(read_search(self.as_json(), self.options.output))

    def remarks(self) -> Iterator[str]:
        """Say what was chosen and why, what it took, and where it was written."""
        from kvsearch.report.search import decision
        from kvsearch.search.ledger import FRONT, PLAN, REPORT

        directory, spent = self.options.output, self.spent
        first = directory / (f"plan-{self.found[0].budget}.json" if self.is_front else PLAN)
        for one in self.found:
            yield f"{f'{one.budget} entries per kv head: ' if self.is_front else ''}{decision(one)}"
        used = f"{spent.evaluations} candidates, {spent.tokens:,} tokens, {spent.seconds:.0f} s"
        written = f"{directory / FRONT} and a plan for each budget"
        yield f"{used}; wrote {written if self.is_front else f'{directory / PLAN} and {directory / REPORT}'}"
        yield following("show", first)
        yield following(*evaluation(self.options, self.options.model, first, self.options.tasks))


@job(EvolveOptions, dry=True)
def dry_run(options: EvolveOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be searched, as JSON; errors as `evolve`, before anything is searched."""
    searches = _prepared(_going_on(options), talk)
    encoded = searches[0].encoded
    questions = {name: sum(task.coverage.questions for task in split) for name, split in encoded.items()}
    how = "stored prompts" if searches[0].base.in_prefill else "whole runs"
    filtered = searches[0].settings.hard_below is not None
    hard = {"replies_before_the_search": 2 * len(searches[0].samples)} if filtered else {}
    candidates = sum(search.most_candidates for search in searches)
    if options.max_evals is not None:
        candidates = min(candidates, options.max_evals)
    talk.say(f"at most {candidates:,} candidates on {len(searches[0].samples)} questions")
    estimate = foretold(searches[0].base.loaded, searches[0].work(candidates), talk)
    told = {"questions": questions, "measured_by": how, "most_candidates": candidates, **estimate}
    return {**_content(searches), **told, **hard, **_own_replies(searches[0])}


@job(EvolveOptions)
def evolve(options: EvolveOptions, talk: Talk) -> Evolution:
    """Search the budgets that serve a task best, at an exact total; a start plan is kept unless one found beats it.

    Searched on split train, chosen on split select, reported on split report, on contexts that no start plan was fitted
    or chosen on. What is found is written if its lead over the best start plan on split select is beyond chance, or
    with `parity` whatever it scores. Writes plan.json, report.json and a
    ledger to the directory `output`; an interrupted search goes on with `resume`.

    Raises:
        UsageError: options, tasks and start plans that do not go together, or a directory that is in use.
        IncompatibleError: start plans of another model, a model that gives no finite values, or one whose full cache
            scores next to nothing.
        EnvironmentFault: Ray is missing, the disk is full, or more than half of a generation failed.
    """
    from kvsearch.plan import save_plan
    from kvsearch.runs.contexts import write_contexts
    from kvsearch.runs.directory import CONFIG, write_json
    from kvsearch.runs.sums import finish
    from kvsearch.search.evolve import Evolved
    from kvsearch.search.front import search_front
    from kvsearch.search.ledger import FRONT, PLAN, REPORT, WRITTEN

    options, was_finished = _going_on(options), _is_finished(options)
    searches, limits = _prepared(options, talk), options.limits
    if not options.resume:
        with talk.progress("batches of the full cache") as progress:
            searches[0].require_answers(progress)
    searches = _on_hard_questions(searches, talk)
    with (
        opened(options, searches, talk) as (searches, executor, run),
        watching(talk, run, limits, len(searches)) as watcher,
    ):
        kept, keep = run.ledger.count, _keep(run.directory, talk)
        write_contexts(run.directory, searches[0].hashes)
        if options.budgets is not None:
            found = search_front(searches, executor, run.ledger, limits, watcher, keep)
            for one in found:
                save_plan(one.choice.plan, run.directory / f"plan-{one.budget}.json", overwrite=True)
        else:
            (search,) = searches
            outcome = search.search(executor, run.ledger, limits, watcher)
            executor.close()  # its memory is for the replies now
            choice = search.choose(outcome, keep)
            save_plan(choice.plan, run.directory / PLAN, overwrite=True)
            found = [Evolved(search, outcome, choice, search.report(choice, keep))]
        result = Evolution(options, found, run.ledger.spent)
        write_json(run.directory / (FRONT if result.is_front else REPORT), result.as_json())
        finish(run.directory, (CONFIG, *WRITTEN, "*.safetensors"))
        if was_finished and run.ledger.count == kept:
            talk.say(FINISHED)
        return result


def configuration(options: EvolveOptions, searches: Sequence[PreparedSearch]) -> RunConfig:
    """Return the configuration of searches that share their questions and a directory."""
    from kvsearch.runs.identity import RunConfig

    workers = options.ray_workers()
    execution = {"limits": asdict(options.limits), "workers": None if workers is None else asdict(workers)}
    return RunConfig(job="evolve", options=options.recorded(), content=_content(searches), execution=execution)


@contextmanager
def opened(
    options: EvolveOptions, searches: tuple[PreparedSearch, ...], talk: Talk
) -> Iterator[tuple[tuple[PreparedSearch, ...], Executor, SearchRun]]:
    """Decide what is teacher-forced, read the prompts, and open the directory: all that comes before candidates.

    Raises:
        UsageError: with `resume`, another search is in the directory; see also `open_search`.
        EnvironmentFault, IncompatibleError: see `make_executor`.
    """
    from kvsearch.search.ledger import open_search, require_same

    if options.resume:
        require_same(options.output, configuration(options, searches), unknown=SEARCHED)
    searches = _answered(searches, talk)
    config = configuration(options, searches)
    if options.resume:
        require_same(options.output, config)
    # who evaluates comes first: with --force the old run is gone only once the new one can begin
    with (
        _executor(searches, options, talk) as executor,
        open_search(options.output, config, options.resume, options.force) as run,
    ):
        yield searches, executor, run


def _is_finished(options: EvolveOptions) -> bool:
    """Tell whether the very search that is asked for is in its directory, finished."""
    from kvsearch.search.ledger import is_repeated

    return not options.force and is_repeated(options.output, options.recorded())


def _going_on(options: EvolveOptions) -> EvolveOptions:
    """Return the options, with `resume` where there is nothing to go on with: the search is finished."""
    return options if options.resume or not _is_finished(options) else options.model_copy(update={"resume": True})


def _prepared(options: EvolveOptions, talk: Talk) -> tuple[PreparedSearch, ...]:
    """Check all that can be checked without a model, then load it, and prepare a search for each budget."""
    from kvsearch.calibration.fitted import fitted_policy
    from kvsearch.plan.schema import PHASES
    from kvsearch.policies import create_policy
    from kvsearch.search.evolve import Splits, prepare_search
    from kvsearch.search.front import prepare_front
    from kvsearch.search.ledger import check_search
    from kvsearch.search.start_plans import Base
    from kvsearch.tasks.catalog import find_tasks

    if options.budget is None and not options.budgets:
        raise UsageError("how many entries may a kv head keep on average? Give --budget, or several with --budgets")
    options.ray_workers()  # told before anything is read
    spec = options.tasks or default_tasks(options.model)
    splits = Splits(*(find_tasks(spec, options.task_options(split)) for split in SPLITS))
    asked = options.asking(options.protocol)
    check_search(options.output, options.resume, options.force)
    plans = _start_plans(options.start)
    policies: list[Policy] = []
    if options.space == "joint":
        policies = _choices(options, plans)
    elif options.policy is None and plans:
        if options.params:
            raise UsageError("--set is for a --policy: the policies of --start plans have their own parameters")
        policy: Any = next(iter(plans.values()))
    else:
        name, fitted = fitted_policy(options.policy or DEFAULT_POLICY)
        policy = create_policy(name, {**fitted, **options.params})
    for name, plan in plans.items():
        if plan.provenance.contexts is None or not plan.provenance.contexts.complete:
            talk.warn(
                f"start plan {name} does not say what it was fitted and chosen on, or not all of it: it may have seen "
                "questions of this search"
            )
    loaded = options.load(options.model, talk)
    base = Base.choosing(loaded, policies) if policies else Base.of(loaded, policy, PHASES[options.phases])
    if options.budget is not None:
        return (prepare_search(base, options.budget, options, splits, asked, plans),)
    return prepare_front(base, options.budgets or (), options, splits, asked, plans)


def _choices(options: EvolveOptions, plans: Mapping[str, Plan]) -> list[Policy]:
    """Return the policies that a layer may have: those of the start plans, then those that are named."""
    from kvsearch.calibration.fitted import fitted_policy
    from kvsearch.policies import create_policy
    from kvsearch.policies.registry import policy_of

    if not plans:
        raise UsageError("space joint begins with the policies of a plan: give one with --start")
    named = [fitted_policy(name) for name in (options.policy or "").split(",") if name]
    known = [policy_of(spec) for plan in plans.values() for spec in plan.policies]
    return [*known, *(create_policy(name, {**fitted, **options.params}) for name, fitted in named)]


def _on_hard_questions(searches: tuple[PreparedSearch, ...], talk: Talk) -> tuple[PreparedSearch, ...]:
    """Leave the questions that are hard, if these alone are to be searched on."""
    from kvsearch.search.difficulty import with_hard_questions

    settings = searches[0].settings
    if settings.hard_below is None:
        return searches
    with talk.progress("how hard questions are") as progress:
        searches, found = with_hard_questions(searches, progress)
    if found is not None:
        talk.say(
            f"searching on {len(found.kept)} of {found.asked} questions: the full cache answers {found.right} right, "
            f"{found.hard} of these score below {settings.hard_below:g} under even budgets of "
            f"{searches[0].budget} entries"
        )
    return searches


def _answered(searches: Sequence[PreparedSearch], talk: Talk) -> tuple[PreparedSearch, ...]:
    """Decide what is teacher-forced after the questions, which all searches share."""
    if not searches[0].needs_replies:
        return tuple(searches)
    with talk.progress("own replies") as progress:
        first = searches[0].answered(progress)
    found = first.answers or {}
    own = sum(answer.own for answer in found.values())
    talk.say(f"the model's own reply is right and teacher-forced after {own} of {len(found)} questions, the right "
             "answer after the others")  # fmt: skip
    return (first, *(replace(one, answers=found) for one in searches[1:]))


def _own_replies(search: PreparedSearch) -> dict[str, int]:
    """Return how many replies the model makes before the search, and how many tokens they have at most."""
    if not search.needs_replies:
        return {}
    return {"own_replies": len(search.samples), "own_reply_tokens": sum(sample.limit for sample in search.samples)}


def _start_plans(paths: Iterable[Path]) -> dict[str, Plan]:
    """Read start plans, by the names of their files."""
    from kvsearch.jobs.plan_files import checked_plan
    from kvsearch.search.start_plans import check_names

    check_names(path.stem for path in paths)
    found: dict[str, Plan] = {}
    for path in paths:
        if path.stem in found:
            raise UsageError(f"two start plans are called {path.stem}: rename one of the files")
        found[path.stem] = checked_plan(path)
    return found


def _content(searches: Sequence[PreparedSearch]) -> dict[str, Any]:
    """Return all that decides the result, as JSON."""
    from kvsearch.evaluation.identity import environment, metric_of, rows_hash

    first = searches[0]
    return {
        **environment(first.base.loaded),
        "settings": first.as_json(),
        "budgets": [one.budget for one in searches],
        "policies": [{"name": one.name, "params": one.parameters()} for one in first.base.policies],
        "starts": [{name: table.tolist() for name, table in one.starts.items()} for one in searches],
        "asked": {"samples": first.asked.samples, "max_length": first.asked.max_length},
        "metrics": {task.task.name: metric_of(task.task) for task in first.encoded["search"]},
        "splits": {name: {task.task.name: rows_hash(task) for task in split} for name, split in first.encoded.items()},
        **({} if first.kept is None and first.answers is None else {SEARCHED: first.data_sha256}),
    }


def _executor(searches: Sequence[PreparedSearch], options: EvolveOptions, talk: Talk) -> Executor:
    """Return who evaluates candidates, with the prompts read."""
    from kvsearch.search.workers import make_executor

    first = searches[0]
    who = "" if options.workers is None else f" by each of {options.workers} workers"
    if first.base.in_prefill:
        talk.say(f"reading {len(first.samples)} questions once for all candidates{who}")
    else:
        talk.say(f"every candidate is run whole on {len(first.samples)} questions{who}: budgets of the decode phase")
    cap = max(search.cap for search in searches)
    with talk.progress("prompts") as progress:
        return make_executor(first, cap, options.memory_bytes, progress)


def _keep(directory: Path, talk: Talk) -> Keep:
    """Return what keeps the replies of choice and report in `directory`; those of other finalists are thrown away."""

    def keep(stage: str, evaluation: Evaluation) -> KeptStage:
        again = "give the same command with --resume to go on"
        place, config = directory / stage, evaluation.config()
        return kept_replies(place, config, evaluation.replies, True, talk, f"{stage}: batches", again)

    return keep
