"""kvsearch run: from a model to its best plan in one command; it goes on where it was killed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from kvsearch.calibration.options import DEFAULT_RECENT, WINDOW_PARAMETERS, LukvOptions
from kvsearch.commands.calibrate import OPTIONS, CalibrateOptions, calibrate, calibrate_together, forecast_calibrations
from kvsearch.commands.evolve import EvolveOptions
from kvsearch.commands.groups import (
    ASKED,
    BUDGET,
    BUDGETS,
    LOADING,
    LOSE_AT_MOST,
    MODEL,
    PROTOCOL,
    RATIO,
    TASK_DETAILS,
    BudgetList,
    ModelOptions,
    RunDirOptions,
    SelectionOptions,
    TaskOptions,
    WorkerOptions,
    choose_default_tasks,
    suggest_plan_commands,
)
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import (
    FINISHED_NOTE,
    NullReporter,
    Reporter,
    StagedProgress,
    StageReporter,
    make_stage_store,
    show_stages,
    warn_about_coverage,
)
from kvsearch.config.options import MACHINE, RULE, SIZE, Names, Share, drop_alternatives, option
from kvsearch.config.recipes import find_shipped_recipe, read_recipe
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.core.fields import Entries, Samples, Time, parse_seconds
from kvsearch.core.items import format_clock
from kvsearch.core.naming import require_known
from kvsearch.evaluation.guarantee import count_needed_contexts, describe_need, refuse_text
from kvsearch.evaluation.statistics import CONFIDENCE, count_contexts
from kvsearch.models.work import StageCost
from kvsearch.plan import Size, save_plan
from kvsearch.plan.methods import create_method
from kvsearch.plan.origin import ContextSet, join_records
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import Fitted, is_last, load_fitted_profile
from kvsearch.policies.registry import has_parameters, is_fitted
from kvsearch.report.costs import Forecast
from kvsearch.report.selections import (
    describe_retained,
    describe_selection,
    describe_smallest,
    make_selection_result,
)
from kvsearch.results.selection import RunResult
from kvsearch.runs.identity import PLAN, RunConfig
from kvsearch.runs.run import Run, lock_for_writing, read_run, write_contexts
from kvsearch.selection.joint import PolicyCurves, read_policy_curves
from kvsearch.selection.probe_heads import rank_heads_by_scores
from kvsearch.selection.records import MIN_CONTEXTS_FOR_PROOF, Rule, compute_shared_level
from kvsearch.tasks.catalog import describe_tasks

if TYPE_CHECKING:
    from kvsearch.commands.searching import RefinedPlans, Refinement
    from kvsearch.evaluation.compare import Evaluation, Split, StageStore
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan
    from kvsearch.plan.origin import Use
    from kvsearch.policies import Policy
    from kvsearch.runtime import Program
    from kvsearch.selection.records import PhaseResult, Rule, Selection, TriedBudget
    from kvsearch.selection.selection_job import SelectionJob
    from kvsearch.tasks.base import Task, TokenCount
    from kvsearch.tasks.encode import TaskPrompts

SIZES_PANEL = "How much is kept"
SIZE_OPTIONS = ("budget", "ratio", "budgets", "lose_at_most")
FIT_FOLDER = "fit"
CURVES_FOLDER = "curves"
REFINE_FOLDER = "refine"
CHOICE_FOLDER = "choice"
RUN_FILE = "run.json"
FILES = (
    FIT_FOLDER,
    CURVES_FOLDER,
    REFINE_FOLDER,
    CHOICE_FOLDER,
    "plan*.json",
    RUN_FILE,
    "contexts.json",
    "*.safetensors",
)
FIT_TOKENS = 36_000  # that rankings are fitted on by default, of all tasks together
MEASURE_TOKENS = 24_000  # that budgets are measured on, and refined on others
BUDGET_PER_PROTECTED = 12  # of a budget that are protected: one in so many
FEW_PROTECTED = 3  # of small budgets, up to a sixth of them: the last entries are needed
MIN_FITTED_CONTEXTS = 24  # contexts, however long they are
MIN_MEASURED_CONTEXTS = 16
RANKING_OPTIONS = {name: kind for name, kind in OPTIONS.items() if create_method(name).fits_policy}
FIT_STAGE = "fit rankings"
MEASURE_STAGE = "measure budgets"
SEARCH_STAGE = "search"
GUARANTEE_TITLE = "find the smallest budget, and report"
ROUND_SHARE = 0.3  # of the rest of a choice that a round takes in the progress
QUICK = "quick"  # an effort, and the recipe that it stands for
MIN_CONTEXTS_PER_TASK = 4  # contexts of a task, below which --time does not shorten a stage
QUICK_TASKS = 4  # that are asked at most
QUICK_CONTEXTS = {"measure": 4, "samples": 8}  # of all tasks together; as many as the latter are reported on
LEFT_TO_QUICK = {
    "effort",
    "policies",
    "rankings",
    "form",
    "fit",
    "measure",
    "samples",
    "protect",
    "refine",
    "evaluations",
}
MAX_STARTS = 8  # plans of a size that a search begins with: those that keep most of what was measured
USUAL_SIZE = Size(ratio=0.9)  # at which heads of a probe are judged, where the size is searched for
BUDGETS_TRIED = 8  # by --lose-at-most, about
CONTEXTS_PER_NEEDED = 2  # that a report has for each that a wish needs: without more no loss at all is allowed
Calibration = TypeVar("Calibration", bound=CalibrateOptions)


class LukvCurveOptions(LukvOptions, CalibrateOptions):
    """Options of the LU-KV measurement of a run, of policies that protect `protect` recent entries."""

    protect: int = DEFAULT_RECENT

    def make_policy(self) -> Policy:
        policy = super().make_policy()
        protected = {"protect": self.protect} if has_parameters(policy.name, *WINDOW_PARAMETERS) else {}
        return create_policy(policy.name, {**policy.parameters(), **protected})

    def with_policies(self, names: Sequence[str]) -> Self:
        """Return the options for measuring these policies, at least one."""
        return self.model_copy(update={"policy": names[0], "rivals": tuple(names[1:])})

    def used(self) -> ContextSet:
        """Return the contexts the rankings were fitted on, where they look better than they are."""
        used = ContextSet()
        for policy in self.policies():
            if isinstance(policy, Fitted):
                contexts = load_fitted_profile(policy.weights, policy.name).metadata.provenance.contexts
                used = used if contexts is None else used.union(contexts.used)
        return used


def resolve_plan_length(size: Size, measured: int, longest: int) -> Size:
    """Resolve the prompt length of a size: the `measured` prompts, in tokens, unless the size has a length.

    If the budget keeps every token of the measured prompts, plans are for the `longest` selection prompt instead.
    """
    if size.length is not None:
        return size
    is_all = measured < longest and size.mean(measured) >= measured
    return replace(size, length=longest if is_all else measured)


class RunOptions(ModelOptions, WorkerOptions, RunDirOptions, TaskOptions, SelectionOptions):
    """Options of `run`: sizes, policies and rankings, and the questions of every stage."""

    job: ClassVar[str] = "run"
    recipes: ClassVar[bool] = True
    alternatives: ClassVar[tuple[str, ...]] = SIZE_OPTIONS
    panel: ClassVar[str] = "What is fitted"

    model: str = option(..., MODEL)
    budget: Entries | None = option(None, BUDGET, panel=SIZES_PANEL)
    ratio: float | None = option(None, RATIO, panel=SIZES_PANEL)
    budgets: BudgetList = option(None, BUDGETS, panel=SIZES_PANEL)
    lose_at_most: Share | None = option(
        None,
        LOSE_AT_MOST,
        essential=SIZE,
        panel=SIZES_PANEL,
        help=f"Find the smallest budget for it. {LOSE_AT_MOST.help}",
    )
    confidence: float | None = option(
        None,
        "--lose-at-most: how sure to be of that. Else: how sure to be that what is written is better than the best "
        "baseline: 0.9 takes what is likely better, 0.95 or more only what beats it.",
        RULE,
        shown="0.95 with --lose-at-most, else 0.9",
        panel=ASKED,
    )
    former: ClassVar[Mapping[str, tuple[str, str]]] = {
        **SelectionOptions.former,
        "smallest": ("", "--lose-at-most"),
        "within": ("X", "--lose-at-most"),
    }
    policies: Names = option(
        ("snapkv", "keydiff", "expected_attention", "cake"),
        "Built-in policies to measure budgets for.",
        RULE,
        metavar="NAME,...",
        completes="kvsearch.policies.registry:list_policy_names",
    )
    rankings: Names = option(
        tuple(RANKING_OPTIONS), "Rankings to fit, and to measure budgets for, too.", metavar="NAME,..."
    )
    form: Literal["network", "linear"] = option("network", "probe: the largest fit that is tried.")
    protocol: Protocol = option(QUESTION_AGNOSTIC, PROTOCOL)
    fit: Samples | None = option(
        None,
        "Contexts per task to fit rankings on.",
        shown="half of what there is to calibrate on, up to 36,000 tokens of all tasks",
    )
    measure: Samples | None = option(
        None,
        "Contexts per task to measure budgets on, and at most as many others to search on.",
        shown="a quarter of what there is, up to 24,000 tokens",
    )
    protect: int | None = option(
        None, "Recent entries that always stay.", shown="a twelfth of the smallest size, 3 to 8", ge=0
    )
    effort: Literal["full", "quick"] = option(
        "full",
        "quick: the recipe run/quick, a first look by 20 contexts, without fitted rankings and without a search.",
    )
    time: Time | None = option(
        None,
        "Do what can be done in about so long, such as 90s, 30m or 1h30m: fewer contexts, or --effort quick.",
        MACHINE,
        metavar="TIME",
        recorded=False,
    )
    refine: bool = option(True, "Leave out the search from the best solved plan.", flag="--no-refine", negated=True)
    evaluations: int = option(40, "Plans that the search tries at each size, cheaply.", ge=1)

    @classmethod
    def translate_former(cls, options: dict[str, Any]) -> dict[str, Any]:
        """See there; --within 2 is --lose-at-most 2%, and --smallest alone 1%."""
        current = super().translate_former(options)
        smallest = current.pop("smallest", False)
        points = current.pop("within", 1 if smallest else None)
        return current if points is None else {**current, "lose_at_most": f"{points}%"}

    @property
    def rule(self) -> Rule:
        """See there; with --lose-at-most the confidence is of the loss."""
        return super().rule if self.lose_at_most is None else Rule()

    @property
    def loss_confidence(self) -> float:
        """The confidence of --lose-at-most; UsageError if it is out of range."""
        return CONFIDENCE if self.confidence is None else Rule(self.confidence).sure

    def split(self, name: str, tasks: Sequence[Task], protocol: Protocol) -> Split:
        """See there; a report has what a loss is shown on, unless --samples says how much."""
        split = super().split(name, tasks, protocol)
        if name != "report" or self.samples is not None or self.lose_at_most is None:
            return split
        contexts = CONTEXTS_PER_NEEDED * count_needed_contexts(self.lose_at_most, self.loss_confidence)
        return replace(split, samples=max(split.samples, -(-contexts // len(tasks))))

    @classmethod
    def merge(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `given` options over those `stated` in a recipe; one size replaces the others.

        --effort quick stands for the recipe of that name, below both, on few contexts of few tasks.
        """
        options = {**drop_alternatives(stated, given, SIZE_OPTIONS), **given}
        if options.get("effort") != QUICK:
            return options
        quick = read_recipe(find_shipped_recipe(QUICK, cls.job)[1], cls.job)
        spec = options.get("tasks") or choose_default_tasks(options.get("model"))
        entries = describe_tasks(spec if isinstance(spec, str) else "+".join(spec))
        if len(entries) > QUICK_TASKS:
            options["tasks"] = "+".join(entries[n * len(entries) // QUICK_TASKS].spec for n in range(QUICK_TASKS))
        tasks = min(len(entries), QUICK_TASKS)
        counts = {name: count // tasks for name, count in QUICK_CONTEXTS.items()}
        return {**drop_alternatives(quick, options, SIZE_OPTIONS), **counts, **options}

    @property
    def sizes(self) -> list[Size]:
        """The given sizes, none with --lose-at-most; UsageError if there are none, or one is out of range."""
        if self.lose_at_most is not None:
            return []
        if self.budgets is not None:
            return [Size(budget) for budget in self.budgets]
        if self.budget is None and self.ratio is None:
            raise UsageError(
                "how much may be kept? Give --budget (entries per kv head), several with --budgets, --ratio (the "
                "share to evict), or --lose-at-most, such as 2%"
            )
        return [Size(self.budget, self.ratio)]

    def plan_file(self, size: Size) -> Path:
        """Return the path of the plan of a size."""
        return self.output / (PLAN if self.budgets is None else f"plan-{size}.json")

    def with_counts(self, tasks: Sequence[Task], length: float, count: TokenCount) -> RunOptions:
        """Fill in the protected entries, and the contexts per task to fit and measure on.

        `tasks` are of the split train, `length` are the tokens of a context, `count` counts them. A task may have few
        contexts: half of them are fitted on, a quarter is measured on, and the rest is searched on.

        Raises:
            UsageError: there is one context, or --fit leaves none to measure on.
        """
        protect = self.protect
        if protect is None:
            smallest = min(
                (size.mean(round(length)) for size in self.sizes), default=float(DEFAULT_RECENT * BUDGET_PER_PROTECTED)
            )
            few = min(FEW_PROTECTED, int(2 * smallest / BUDGET_PER_PROTECTED))
            protect = max(min(DEFAULT_RECENT, int(smallest / BUDGET_PER_PROTECTED)), few, 1)
        fit = self.fit or round(max(FIT_TOKENS / length, MIN_FITTED_CONTEXTS) / len(tasks)) or 1
        measure = self.measure or round(max(MEASURE_TOKENS / length, MIN_MEASURED_CONTEXTS) / len(tasks)) or 1
        for task in tasks:
            available = len(task.examples(2 * fit + 4 * measure, self.seed, count))
            if self.fit is None:
                fit = min(fit, max(available // 2, 1))
            if self.measure is None:
                measure = min(measure, max(available // 4, 1))
            if self.rankings and available <= fit:
                lower = f"lower --fit to at most {available - 1}" if available > 1 else "give more"
                raise UsageError(
                    f"task {task.name}: its split train has {available} contexts, and {fit} are fitted on, but budgets "
                    f"are measured on others: {lower}"
                )
        return self.model_copy(update={"fit": fit, "measure": measure, "protect": protect})

    def make_calibration(
        self, kind: type[Calibration], stage: str, samples: int | None, seed: int, **more: Any
    ) -> Calibration:
        """Make the options of a calibration stage on contexts of the tasks' split train.

        How many `samples` these are is not known before the model is.
        """
        names = (*LOADING, *TASK_DETAILS, "max_length")
        shared = {name: getattr(self, name) for name in names}
        return kind.of(
            model=self.model, output=self.output / stage, method=kind.model_fields["method"].default, seed=seed,
            tasks=self.tasks or choose_default_tasks(self.model), samples=samples or 1,
            protect=DEFAULT_RECENT if self.protect is None else self.protect, **shared, **more,
        )  # fmt: skip

    def make_fits(self) -> dict[str, CalibrateOptions]:
        """Make the calibration options of every ranking to fit, by name."""
        forms = {"probe": {"form": self.form}}
        return {
            name: self.make_calibration(
                RANKING_OPTIONS[name], f"{FIT_FOLDER}/{name}", self.fit, self.seed, **forms.get(name, {})
            )
            for name in self.rankings
        }

    def check_names(self) -> None:
        """Raise UsageError if a ranking is unknown, or a policy is a fitted one."""
        for name in self.rankings:
            require_known("ranking", name, list(RANKING_OPTIONS))
        for name in self.policies:
            if is_fitted(name.partition("=")[0]):
                raise UsageError(
                    f"--policies {name}: policies that are fitted are not for --policies; a run fits its own, those of "
                    f"--rankings ({', '.join(RANKING_OPTIONS)})"
                )

    def make_curves(self) -> LukvCurveOptions:
        """Make the options for measuring the importance that built-in policies keep.

        It is on other contexts than rankings are fitted on: there they look better than they are. The choice checks it.
        """
        curves = self.make_calibration(LukvCurveOptions, CURVES_FOLDER, self.measure, self.seed + 1, check=False)
        return curves.with_policies(self.policies)

    def refinement(self, loaded: LoadedModel, tasks: Sequence[Task]) -> Refinement:
        """Make the search that refines plans, on contexts of `tasks`, which are of the split train."""
        from kvsearch.commands.searching import Refinement, limit_search

        names = (*LOADING, "max_length", "batch", "max_memory", "protocol")
        search = EvolveOptions.of(
            model=self.model, output=self.output / REFINE_FOLDER, space="joint", seed=self.seed + 2,
            samples=max(self.measure or 1, 2), generations=self.evaluations,
            **{name: getattr(self, name) for name in names},
        )  # fmt: skip
        searched = limit_search(search.split("train", tasks, search.protocol), loaded)
        return Refinement(loaded, search.settings(), search.output, search.config, searched)


# --- what can be done in a time ---------------------------------------------------------------------------------------


def prepare_form(options: RunOptions, reporter: Reporter, models: ModelLoader) -> tuple[RunOptions, RunStages]:
    """Prepare the options and stages of a run; with --time, the most thorough form that fits into the time.

    A form of this run that was started is resumed.

    Raises:
        UsageError: the time is too short for the shortest form; else as `prepare_run`.
    """
    stages = prepare_run(options, reporter, models)
    if options.time is None:
        return options, stages
    from kvsearch.runtime.speed import Speed

    loaded = ModelLoader(given=stages.loaded)
    speed = Speed.of(stages.loaded.model, stages.costs)
    began = None if options.force else read_run(options.output, "run")
    needed = 0.0
    for form, left_out in find_forms(options, stages):
        tried = stages
        if form is not options:
            with warnings.catch_warnings():  # of forms that are not taken nothing is told
                warnings.simplefilter("ignore", KvsearchWarning)
                tried = prepare_run(form, NullReporter(), loaded)
        needed = sum(speed.seconds(cost.work) for cost in tried.costs)
        if form.to_recipe() == began.options if began is not None else needed <= parse_seconds(options.time):
            takes = " to ".join(map(format_clock, speed.range_of(needed)))
            reporter.say(f"--time {options.time}: {left_out}, takes about {takes}")
            return form, stages if form is options else prepare_run(form, reporter, loaded)
    if began is not None:
        return options, stages  # another run is there, which is refused
    raise UsageError(
        f"--time {options.time}: the shortest run there is takes about {format_clock(needed)} here: "
        "give more, fewer or "
        "shorter contexts, or a faster device"
    )


def find_forms(options: RunOptions, stages: RunStages) -> Iterator[tuple[RunOptions, str]]:
    """Yield forms of a run, each shorter than the one before, with a description of what is left out."""
    yield options, "nothing is left out"
    selection_contexts = max(task.coverage.contexts for task in stages.encoded["select"])
    fitted = next((fit.samples for fit in stages.fits.values()), None)
    full_counts = {"fit": fitted, "measure": stages.curves.samples, "samples": selection_contexts}
    if options.lose_at_most is not None:
        del full_counts["samples"]  # fewer contexts show less
    if options.effort != QUICK:
        for part in (2, 4, 8):
            counts = {
                name: max(count // part, min(count, MIN_CONTEXTS_PER_TASK))
                for name, count in full_counts.items()
                if count
            }
            reduced = ", ".join(f"{count} of {full_counts[name]} for --{name}" for name, count in counts.items())
            yield options.model_copy(update=counts), f"left out are all but so many contexts per task: {reduced}"
    if options.lose_at_most is not None:
        return
    stated = {name: getattr(options, name) for name in options.model_fields_set - LEFT_TO_QUICK}
    quick = type(options).of(**{**stated, "effort": QUICK})
    left_out = "left out are rankings, the search, all but three policies and all but"
    if options.effort != QUICK:
        yield quick, f"--effort quick: {left_out} 20 contexts"
    tasks = len(quick.find_tasks(options.model, "select"))
    yield quick.model_copy(update={"measure": 1, "samples": 2}), f"{left_out} {5 * tasks} contexts"


def remarks(options: RunOptions, result: RunResult) -> Iterator[str]:
    """Yield the choice, its scores, its files, and commands for the next step."""
    files = []
    for choice in result.sizes.values():
        which = f"{choice.size.words}: " if len(result.sizes) > 1 else ""
        first, *others = describe_selection(choice)
        yield from (f"{which}{first}", *others)
        files.append(options.output / str(choice.plan))
    yield f"wrote {', '.join(map(str, files))}"
    yield from suggest_plan_commands(files[0], options.model, options)


def dry_run(options: RunOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast the stages of `run` with their costs; errors as `run` before any measurement."""
    options, stages = prepare_form(options, reporter, models)
    content = {"model": options.model, "sizes": [size.as_json() for size in options.sizes]}
    return Forecast(content, stages.costs, stages.loaded.model)


@job(RunOptions)
def run(options: RunOptions, reporter: Reporter, models: ModelLoader) -> RunResult:
    """Fit rankings, measure budgets, pick the best plan on held-out questions, score it on others.

    Writes plan.json (plan-N.json of several budgets) and run.json to `output`. Every stage is kept in a directory of
    its own below it: the same call goes on where it stopped, and of a finished run it repeats the result.

    Raises:
        UsageError: options that do not go together, a size that evicts nothing or that no policy can keep, too few
            contexts, or something else in `output`.
        IncompatibleError: the model computes NaN, or its full cache scores next to nothing.
        EnvironmentFault: the disk is full, or the model cannot be loaded here.
    """
    options, stages = prepare_form(options, reporter, models)
    directory = options.output
    recorded = options.to_recipe()
    config = RunConfig(job="run", options=recorded, content=stages.describe(recorded))
    with Run.open(directory, config, force=options.force, files=FILES) as opened:
        forecast = Forecast({}, stages.costs, stages.loaded.model)
        with show_stages(reporter, forecast.work, directory, forecast.words) as display:
            calibrated = stages.calibrate(display)
            refined = stages.refine(calibrated, display)
            selections = stages.select(calibrated, refined, display)
            tried: Sequence[TriedBudget] = ()
            if options.lose_at_most is not None:
                wish = (options.lose_at_most, options.loss_confidence)
                selection, tried = stages.find_guaranteed(*wish, calibrated, display)
                selections.append(selection)
        sizes = {}
        for selection in selections:
            file = options.plan_file(selection.job.size)
            save_plan(selection.plan, file, overwrite=True)
            sizes[str(selection.job.size)] = make_selection_result(selection, file.name)
        write_contexts(directory, stages.hashes)
        result = RunResult(sizes=sizes, tried=tuple(tried))
        opened.write(RUN_FILE, result.as_json())
        opened.finish()
    if tried:
        reporter.say(describe_smallest(tried, stages.longest, selections[0].plan))
    for choice in result.choices:
        if warning := describe_retained(choice):
            reporter.warn(warning if len(sizes) == 1 else f"{choice.size.words}: {warning}")
    if opened.state == "finished":
        reporter.say(FINISHED_NOTE)
    return result


def collect_warnings(
    encoded: Sequence[TaskPrompts], fitted_on: Sequence[Task], fit: int, seed: int, count: TokenCount
) -> Iterator[str]:
    """Yield warnings about the choice: few contexts, and kinds of questions that rankings are not fitted on.

    Args:
        encoded: what is chosen by.
        fitted_on: the tasks that rankings are fitted on, `fit` contexts of each; none if none are fitted.
        fit: how many contexts of a task they are fitted on.
        seed: draws these contexts.
        count: counts the tokens of a text.
    """
    contexts = count_contexts(encoded)
    if contexts < MIN_CONTEXTS_FOR_PROOF:
        yield (
            f"there are {contexts} contexts to choose by, and {MIN_CONTEXTS_FOR_PROOF} are needed to show that a plan "
            "beats the baselines: what is written is likely better at most"
        )
    if not fitted_on:
        return
    kinds = {
        (task.task.name, question.query.category)
        for task in encoded
        for prompt in task.prompts
        for question in prompt.questions
    }
    fitted = {
        (task.name, query.category)
        for task in fitted_on
        for example in task.examples(fit, seed, count)
        for query in example.queries
    }
    absent = sorted(f"{task} ({category})" if category else task for task, category in kinds - fitted)
    if absent:
        yield (f"asked but not fitted on: {', '.join(absent)}; a ranking may be far worse on what it was not fitted on")


def prepare_run(options: RunOptions, reporter: Reporter, models: ModelLoader) -> RunStages:
    """Load the model and the questions of a run, and check all that can be checked before its first stage.

    Raises:
        UsageError, IncompatibleError, EnvironmentFault: see `run`; sizes are checked against the longest context.
    """
    sizes = options.sizes
    read_run(options.output, "run")
    tasks = {name: options.find_tasks(options.model, name) for name in ("train", "select", "report")}
    if options.lose_at_most is not None:
        refuse_text(tasks["report"])
    options.check_names()
    rule = options.rule
    options.make_fits()  # tells of settings that are wrong before the model is loaded
    measured = options.make_curves().policies()
    from kvsearch.commands.searching import MAX_CANDIDATES
    from kvsearch.runtime import Program
    from kvsearch.selection.candidates import list_expected_plans
    from kvsearch.selection.splits import refuse_shared
    from kvsearch.tasks.encode import make_token_counter

    splits = {name: options.split(name, tasks[name], options.protocol) for name in ("select", "report")}
    loaded = models.load(options.model)
    usable = find_usable_policies(loaded, dict(zip(options.policies, measured, strict=True)), reporter)
    encoded = {name: split.encode(loaded) for name, split in splits.items()}
    refuse_shared(encoded)
    warn_about_coverage(reporter, [*encoded["select"], *encoded["report"]], few=options.samples is not None)
    if options.lose_at_most is not None:
        reported = count_contexts(encoded["report"])
        reporter.say(describe_need(options.lose_at_most, options.loss_confidence, reported))
    lengths = [len(prompt.context) for task in encoded["select"] for prompt in task.prompts]
    count = make_token_counter(loaded.tokenizer)
    counted = options.with_counts(tasks["train"], sum(lengths) / len(lengths), count)
    fitted_on = tasks["train"] if options.rankings else []
    for warning in collect_warnings(encoded["select"], fitted_on, counted.fit or 1, options.seed, count):
        reporter.warn(warning)
    refinement = counted.refinement(loaded, tasks["train"]) if options.refine and sizes else None
    curves = counted.make_curves()
    floor = min(policy.least for policy in curves.policies())
    programs_by_size = {}
    for size in sizes:
        if size.mean(max(lengths)) < floor:
            raise UsageError(
                f"{size.words}: every policy of --policies always keeps more (sinks and recent entries), {floor} "
                "at least: keep more"
            )
        known = replace(size, length=max(lengths))
        plans = list_expected_plans(loaded, known, len(usable), len(options.rankings), MAX_CANDIDATES * options.refine)
        programs_by_size[size] = [Program.from_plan(loaded.model, plan) for plan in plans]
    stages = RunStages(
        loaded=loaded, output=options.output, sizes=sizes, rule=rule, seed=options.seed, splits=splits,
        encoded=encoded, longest=max(lengths), fits=counted.make_fits(), curves=curves.with_policies(usable),
        refinement=refinement,
    )  # fmt: skip
    return replace(stages, costs=stages.estimate_costs(programs_by_size, options.lose_at_most is not None, reporter))


def find_usable_policies(loaded: LoadedModel, policies: Mapping[str, Policy], reporter: Reporter) -> list[str]:
    """Find the policies, by their names, that can be used on a model; the others are warned of.

    Raises:
        UsageError: none can be.
    """
    from kvsearch.runtime.cache import check_rotary

    usable = []
    for name, policy in policies.items():
        try:
            check_rotary(loaded.model, [policy])
            usable.append(name)
        except IncompatibleError as error:  # it needs what this model does not have
            reporter.warn(f"no budgets for {policy.name}: {error}")
    if not usable:
        raise UsageError(f"none of --policies {','.join(policies)} can be used on this model: name others")
    return usable


@dataclass(frozen=True, kw_only=True)
class RunStages:
    """The stages of a run on a model; each stage keeps its finished work in a folder below `output`.

    Args:
        loaded: the model.
        output: the directory of the run.
        sizes: the sizes to choose a plan for; none where the smallest is searched for.
        rule: how a plan is chosen.
        seed: draws the questions that are screened with.
        splits: the contexts to choose by ("select") and to report on ("report").
        encoded: their questions before anything was fitted.
        longest: tokens of the longest context that is chosen by.
        fits: how every ranking is fitted, by its name.
        curves: how budgets are measured, of the built-in policies that can be used on this model.
        refinement: the search that begins at the solved plans; None: there is none.
        costs: of the stages, in their order, as far as they can be told before the first one has run.
    """

    loaded: LoadedModel
    output: Path
    sizes: Sequence[Size]
    rule: Rule
    seed: int
    splits: Mapping[str, Split]
    encoded: Mapping[str, list[TaskPrompts]]
    longest: int
    fits: Mapping[str, CalibrateOptions]
    curves: LukvCurveOptions
    refinement: Refinement | None
    costs: Sequence[StageCost] = ()

    def estimate_costs(
        self, programs_by_size: Mapping[Size, list[Program]], guaranteed: bool, reporter: Reporter
    ) -> list[StageCost]:
        """Estimate the costs of the stages; contexts too short or too long for a stage are refused here.

        `programs_by_size` are about those that are compared, see `list_expected_plans`.
        """
        from kvsearch.evaluation.compare import estimate_replies
        from kvsearch.runtime.program import make_full_program
        from kvsearch.selection.plan_race import choose_screening_questions, estimate_choice
        from kvsearch.selection.selection_job import choose_reported

        model = self.loaded.model
        calibrations = {FIT_STAGE: list(self.fits.values())} if self.fits else {}
        calibrations[MEASURE_STAGE] = [self.curves]  # the rankings add a look at what is read anyway
        costs = []
        quiet = StageReporter(reporter, lambda *_: None)
        for name, several in calibrations.items():
            anew = [each.model_copy(update={"force": True}) for each in several]
            forecast = forecast_calibrations(anew, quiet, ModelLoader(given=self.loaded))
            costs += [replace(cost, name=name) for cost in forecast.stages]
        if self.refinement is not None:
            costs.append(self.refinement.estimate_cost(SEARCH_STAGE, len(programs_by_size)))
        screened = choose_screening_questions(self.encoded["select"], self.seed)
        for size, programs in programs_by_size.items():
            name = f"choose at {size.words}"
            costs.append(
                estimate_choice(model, name, self.encoded["select"], self.splits["select"], programs, screened)
            )
        for size, programs in programs_by_size.items():
            name = f"report at {size.words}"
            reported = choose_reported(programs)
            costs.append(estimate_replies(model, name, self.encoded["report"], self.splits["report"], reported))
        if guaranteed:
            programs = [make_full_program(model)] * BUDGETS_TRIED
            report = estimate_replies(model, GUARANTEE_TITLE, self.encoded["report"], self.splits["report"], programs)
            choice = estimate_choice(
                model, GUARANTEE_TITLE, self.encoded["select"], self.splits["select"], programs * 2, screened
            )
            costs.append(replace(choice, work=choice.work * BUDGETS_TRIED + report.work))
        return costs

    @property
    def hashes(self) -> dict[Use, list[str]]:
        """Hashes of the contexts of selection and report."""
        from kvsearch.tasks.encode import list_context_hashes

        return {
            "chosen": list_context_hashes(self.encoded["select"]),
            "reported": list_context_hashes(self.encoded["report"]),
        }

    def describe(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings that decide the result, as JSON; contexts to fit on are in the stages' configurations."""
        from kvsearch.evaluation.runner import describe_environment, find_metric_name, hash_rows

        left_out = {"batch", "max_memory", *LOADING}
        stated = {name: value for name, value in recorded.items() if name not in left_out}
        rows = {split: {task.task.name: hash_rows(task) for task in tasks} for split, tasks in self.encoded.items()}
        metrics = {task.task.name: find_metric_name(task.task) for task in self.encoded["select"]}
        return {**describe_environment(self.loaded), "options": stated, "rows": rows, "metrics": metrics}

    # --- what they do -------------------------------------------------------------------------------------------------

    def calibrate(self, display: StagedProgress) -> PolicyCurves:
        """Fit the rankings, then measure the importance that every policy and ranking keeps.

        Heads of a probe that one built-in score serves better rank by that, see `rank_heads_by_scores`.
        """
        rankings = {}
        if self.fits:
            with display.stage(FIT_STAGE) as stage, ExitStack() as locks:
                for fit in self.fits.values():
                    locks.enter_context(lock_for_writing(fit.output))
                profiles = calibrate_together([*self.fits.values()], stage, ModelLoader(given=self.loaded))
                for name, profile in zip(self.fits, profiles, strict=True):
                    if is_last(profile.arrays):
                        stage.warn(f"the ranking {name} is left out: the built-in ones are better on held-out contexts")
                    else:
                        rankings[name] = profile
        with display.stage(MEASURE_STAGE) as stage:
            fitted = [f"{name}={self.output / FIT_FOLDER / name}" for name in rankings]
            options = self.curves.with_policies((self.curves.policy, *self.curves.rivals, *fitted))
            profile = calibrate(options, reporter=stage, loaded=self.loaded)
            curves = replace(read_policy_curves(profile), rankings=rankings)
            length = profile.metadata.length
            sizes = sorted(self.sizes or [USUAL_SIZE], key=lambda size: size.mean(length))
            return rank_heads_by_scores(curves, replace(sizes[len(sizes) // 2], length=length))

    def refine(self, calibrated: PolicyCurves, display: StagedProgress) -> RefinedPlans | None:
        """Refine the solved plans of every size by search; None if that is not wanted or not possible."""
        from kvsearch.selection.candidates import find_policy_candidates

        refinement = self.refinement
        if refinement is None:
            return None
        with display.stage(SEARCH_STAGE) as stage:
            starts = {}
            for size in self.sizes:
                planned = resolve_plan_length(size, calibrated.profile.metadata.length, self.longest)
                plans = calibrated.select_plans(find_policy_candidates(self.loaded, calibrated, planned).plans)
                ranked = sorted(plans, key=lambda name: -calibrated.measure_kept(plans[name]))
                starts[planned] = {name: plans[name] for name in ranked[:MAX_STARTS]}
            return refinement.run(calibrated, starts, stage)

    def select(
        self, calibrated: PolicyCurves, refined: RefinedPlans | None, display: StagedProgress
    ) -> list[Selection]:
        """Choose at every size; then report, as sizes share the chance of a wrong choice."""
        decided: list[tuple[SelectionJob, PhaseResult]] = []

        def level() -> float:
            return compute_shared_level(self.rule.level, len(self.sizes), (result for _, result in decided))

        for size in self.sizes:
            with display.stage(f"choose at {size.words}") as stage:
                selection = self._prepare_selection(calibrated, size, refined)
                stage.part = ROUND_SHARE
                result = selection.race.decide(self._reply_store(selection, stage), level(), answered=True)
                decided.append((selection, result))
        selections = []
        for selection, result in decided:
            with display.stage(f"report at {selection.size.words}") as stage:
                store = self._reply_store(selection, stage)
                selections.append(selection.report(result.with_level(level()), store))
        return selections

    def find_guaranteed(
        self, bound: float, confidence: float, calibrated: PolicyCurves, display: StagedProgress
    ) -> tuple[Selection, Sequence[TriedBudget]]:
        """Find the smallest budget that is shown to lose at most `bound`, from the protected entries on, and report."""
        from kvsearch.selection.selection_job import find_guaranteed_budget, list_budgets

        floor = min(policy.least for policy in self.curves.policies())
        with display.stage(GUARANTEE_TITLE) as stage:
            budgets = list_budgets(floor + 1, self.longest - 1)
            stage.part = ROUND_SHARE

            def selection_at(budget: int) -> tuple[SelectionJob, StageStore]:
                selection = self._prepare_selection(calibrated, Size(budget), None)
                return selection, self._reply_store(selection, stage)

            def configure(evaluation: Evaluation) -> RunConfig:
                plans = {method.name: method.definition for method in evaluation.methods}
                return evaluation.stage_config("run", plans=plans)

            tested = make_stage_store(self.output / CHOICE_FOLDER, configure, stage)
            return find_guaranteed_budget(budgets, bound, confidence, selection_at, tested)

    def _prepare_selection(self, calibrated: PolicyCurves, size: Size, refined: RefinedPlans | None) -> SelectionJob:
        """Prepare the choice at a size, on contexts that nothing was fitted on."""
        from kvsearch.selection.candidates import find_policy_candidates
        from kvsearch.selection.selection_job import prepare_selection

        contexts = calibrated.contexts
        refined_plans: Mapping[str, Plan] = {}
        planned = resolve_plan_length(size, calibrated.profile.metadata.length, self.longest)
        if refined is not None:
            plans_by_size, searched = refined
            contexts = join_records([contexts, searched])
            refined_plans = plans_by_size[planned]
        used = None if contexts is None else contexts.used
        plans = find_policy_candidates(self.loaded, calibrated, planned, refined_plans)
        choice, reported = (self.splits[name].without(used) for name in ("select", "report"))
        return prepare_selection(self.loaded, plans, size, choice, reported, self.rule)

    def _reply_store(self, selection: SelectionJob, reporter: StageReporter) -> StageStore:
        """Return what keeps the replies of all rounds and of the report at a size."""
        return make_stage_store(self.output / CHOICE_FOLDER / str(selection.size), selection.race.config, reporter)
