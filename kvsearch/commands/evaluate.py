"""kvsearch evaluate and headroom: methods and plans on the same questions, and how much of the score can be kept."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, TypeAdapter

from kvsearch.commands.export import write_files
from kvsearch.commands.groups import (
    ASKED,
    KEPT,
    LOSE_AT_MOST,
    MODEL,
    OUTPUT_OPTION,
    PROTOCOL,
    RATIO,
    SAMPLES_OPTION,
    BatchOptions,
    ModelOptions,
    TaskOptions,
    WorkerOptions,
)
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter, open_replies, warn_about_coverage
from kvsearch.config.options import RULE, SIZE, Commas, Repeated, Seeded, Share, option
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Samples
from kvsearch.core.files import check_output, require_directory
from kvsearch.core.items import Progress
from kvsearch.core.parsing import read_json, validate_content
from kvsearch.evaluation.guarantee import (
    describe_need,
    find_shown_bound,
    make_guarantee,
    measure_context_losses,
    refuse_text,
    require_unseen,
    shows_bound,
)
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import LayerLoss, write_samples
from kvsearch.evaluation.statistics import CONFIDENCE, count_contexts, share_level, summarize
from kvsearch.exporters.base import ExportedFiles
from kvsearch.plan import Size, load_plan
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.report.costs import Forecast
from kvsearch.report.evaluation import write_tables
from kvsearch.report.records import record_files
from kvsearch.report.table import check_table_file
from kvsearch.results.evaluation import EvaluationResult, HeadroomResult, ShownLoss
from kvsearch.runs.identity import LOSSES, REPORT, SAMPLES, TABLES
from kvsearch.runs.run import read_run, write_json
from kvsearch.tasks.base import Sampling

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.ready_methods import Request


class EvaluateOptions(ModelOptions, WorkerOptions, TaskOptions, BatchOptions):
    """Options of `evaluate`: methods or plans, tasks, and output."""

    job: ClassVar[str] = "evaluate"
    recipes: ClassVar[bool] = True
    panel: ClassVar[str] = "What is compared"

    model: str = option(..., MODEL)
    plan: Annotated[tuple[Path, ...], Repeated] = option((), "A plan file; repeatable.", SIZE, repeated=True)
    samples: Samples = option(20, SAMPLES_OPTION)
    methods: Commas | None = option(
        None,
        "Methods to compare: uniform, pyramid, adakv, ada-pyramid, cake, lava, lava-uniform, lava-pyramid, "
        "lava-equal-heads, defensivekv, layer-defensivekv, pooled, any policy (with even budgets), random; "
        "METHOD:POLICY puts another policy under a method's budgets, NAME=DIR looks budgets up in a profile of "
        "`calibrate`.",
        SIZE,
        metavar="NAME,...",
        completes="kvsearch.evaluation.names:list_method_names",
    )
    budgets: Commas | None = option(
        None, "Sizes of the methods: entries per kv head, on average.", SIZE, metavar="N,..."
    )
    ratios: Commas | None = option(None, "Sizes of the methods: shares of the prompt to evict.", SIZE, metavar="R,...")
    protocol: Protocol = option(QUESTION_AGNOSTIC, PROTOCOL)
    phases: str | None = option(None, "When the methods evict, all alike: prefill, decode or both.", shown="prefill")
    settings: Annotated[tuple[str, ...], Repeated] = option(
        (),
        "A setting of all methods that have it (window=8), or of one (lava.window=8); repeatable.",
        flag="--set",
        metavar="KEY=VALUE",
        repeated=True,
    )
    baselines: Commas | None = option(
        None,
        "What plans are compared with, at their entries: uniform, snapkv, streaming, random.",
        RULE,
        shown="uniform,snapkv,streaming",
    )
    split: str | None = option(
        None,
        "Part of the examples: train, select, report or all; synthetic has calibrate in place of all.",
        panel=ASKED,
        shown="synthetic and ruler: report, others: all",
    )
    temperature: float = option(
        0, "Draw replies at this temperature, 0.6 for reasoning models; 0: they are greedy.", panel=ASKED, ge=0
    )
    top_p: float | None = option(
        None, "Draw from the likeliest tokens that make up this share.", panel=ASKED, shown="1: all", gt=0, le=1
    )
    replies: int | None = option(None, "Replies to each question, drawn.", panel=ASKED, shown="1", ge=1)
    output: Path | None = option(None, OUTPUT_OPTION, panel=KEPT)
    force: bool = option(
        False, "Start the run in --output anew; replace --table and --records.", panel=KEPT, recorded=False
    )
    table: Path | None = option(
        None,
        "Write the tables to this .md or .tex file, or every number of them to this .csv file.",
        metavar="FILE",
        panel=KEPT,
        recorded=False,
    )
    records: Path | None = option(
        None,
        "Write every reply into this folder in the files of kvpress' evaluation, a folder per method.",
        metavar="DIR",
        panel=KEPT,
        recorded=False,
    )
    losses: bool = option(
        False, "Also measure what every layer's attention output loses under every method.", panel=KEPT
    )

    guarantee: bool = option(
        False, "Say what every plan is shown to lose at most to the full cache, whatever the distribution.", panel=KEPT
    )
    lose_at_most: Share | None = option(None, LOSE_AT_MOST, panel=KEPT)
    confidence: float = option(CONFIDENCE, "--guarantee, --lose-at-most: how sure to be.", panel=KEPT, ge=0.5, lt=1)

    @property
    def guarantees(self) -> bool:
        """Whether it is to be said what plans lose at most; UsageError if there is no plan."""
        wanted = self.guarantee or self.lose_at_most is not None
        if wanted and not self.plan:
            raise UsageError("--guarantee is about plans: give one with --plan")
        return wanted

    @property
    def sampling(self) -> Sampling | None:
        """Sampling of replies; None: greedy."""
        if self.temperature == 0:
            if self.replies is not None or self.top_p is not None:
                raise UsageError("--replies and --top-p are of replies that are drawn: give a --temperature above 0")
            return None
        return Sampling(self.temperature, self.top_p or 1.0, self.replies or 1, self.seed)

    def check_files(self) -> None:
        """Raise UsageError if what is to be written cannot be, or table or records are there already and would be lost.

        A finished run that is repeated finds the table and the records that it has written itself.
        """
        if self.output is not None:
            read_run(self.output, "evaluate")
        is_finished = self.output is not None and (self.output / REPORT).exists() and not self.force
        if self.records is not None:
            require_directory(self.records)
            if self.records.exists() and any(self.records.iterdir()) and not (self.force or is_finished):
                raise UsageError(f"{self.records} is not empty: name another folder, or --force to replace its records")
        if self.table is None:
            return
        check_table_file(self.table)
        if not is_finished:
            check_output(self.table, self.force)


def dry_run(options: EvaluateOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast `evaluate`; errors as `evaluate` before any reply."""
    request, evaluation = _prepare(options, reporter, models)
    content = {
        "tasks": [task.task.name for task in evaluation.encoded], "protocol": options.protocol, **request.as_json(),
        "contexts": sum(task.coverage.contexts for task in evaluation.encoded), "replies": evaluation.replies,
    }  # fmt: skip
    cost = evaluation.cost(f"replies under {len(evaluation.methods)} methods")
    return Forecast(content, [cost], evaluation.loaded.model)


@job(EvaluateOptions)
def evaluate(options: EvaluateOptions, reporter: Reporter, models: ModelLoader) -> EvaluationResult:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With `output`, a run that is interrupted goes on where it stopped when the same call is repeated. The
    first of `notes` says so where the full cache itself scores next to nothing.

    Raises:
        UsageError: options that do not go together, or files that cannot be read or written.
        IncompatibleError: plans, profiles or questions do not fit the model.
    """
    request, evaluation = _prepare(options, reporter, models)
    directory = options.output
    config = evaluation.config().changed(options=options.to_recipe())
    with (
        open_replies(directory, config, evaluation.replies, reporter, options.force) as store,
        reporter.progress("asking: context") as progress,
    ):
        comparison = evaluation.run(progress, store)
        losses = _output_losses(evaluation, directory, options.losses, progress)
        result = EvaluationResult.of(comparison, losses, _show_losses(options, request, comparison))
        if directory is not None:
            write_samples(comparison.samples, directory / SAMPLES)
            write_tables(result, directory / TABLES)
            write_json(directory / REPORT, result.as_json())
        if options.table is not None:
            write_tables(result, options.table, options.force)
        if options.records is not None:
            write_files(ExportedFiles(record_files(comparison), ()), options.records, force=True)
    return result


def _prepare(options: EvaluateOptions, reporter: Reporter, models: ModelLoader) -> tuple[Request, Evaluation]:
    """Prepare the comparison and its evaluation with the model; warn about weak comparisons."""
    options.check_files()
    sampling = options.sampling
    tasks = options.find_tasks(options.model, options.split)
    for path in options.plan:
        load_plan(path)
    if options.guarantees:
        refuse_text(tasks)
    from kvsearch.evaluation.ready_methods import read_request

    request = read_request(
        options.plan, options.methods, options.budgets, options.ratios, options.phases, options.settings,
        options.baselines,
    )  # fmt: skip
    from kvsearch.evaluation.compare import prepare
    from kvsearch.evaluation.totals import find_idle_methods

    loaded = models.load(options.model)
    split = replace(options.make_split(tasks, options.samples, options.protocol), sampling=sampling)
    evaluation = prepare(loaded, request.prepare(loaded), request.subject, split)
    warn_about_coverage(reporter, evaluation.encoded)
    if options.guarantees:
        require_unseen(evaluation, request.plans)
        contexts = count_contexts(evaluation.encoded)
        reporter.say(describe_need(options.lose_at_most, share_level(options.confidence, len(request.plans)), contexts))
    for name, seen in evaluation.seen.items():
        if seen.warning is not None:
            reporter.warn(f"{name}: {seen.warning}")
    if idle := find_idle_methods(evaluation):
        reporter.warn(
            f"{', '.join(idle)}: nothing is evicted from any prompt, so this is the full cache: keep fewer entries"
        )
    return request, evaluation


def _show_losses(options: EvaluateOptions, request: Request, comparison: Evaluation) -> dict[str, ShownLoss]:
    """Return what every plan is shown to lose at most, if that is wanted: statements that hold together."""
    if not options.guarantees:
        return {}
    level = share_level(options.confidence, len(request.plans))
    shown = {}
    labels = {method.name: method.label for method in comparison.methods}
    for name, plan in request.plans.items():
        losses = measure_context_losses(comparison.samples, labels[name], comparison.contexts)
        bound = find_shown_bound(losses, level)
        guarantee = make_guarantee(
            plan, losses, bound, options.confidence, comparison.encoded, comparison.split.protocol
        )
        wished = options.lose_at_most
        holds = None if wished is None else shows_bound(losses, wished, level)
        shown[name] = ShownLoss(guarantee=guarantee, wished=wished, holds=holds)
    return shown


def _output_losses(
    evaluation: Evaluation, directory: Path | None, wanted: bool, progress: Progress
) -> list[LayerLoss] | None:
    """Return the output losses of all methods but the full cache, if they are wanted; a kept run measures them once."""
    file = None if directory is None else directory / LOSSES
    if file is not None and file.exists():
        return read_losses(file)
    if not wanted:
        return None
    from kvsearch.evaluation.losses import measure_losses

    split = evaluation.split
    programs = {method.label: method.program for method in evaluation.methods if method.name != FULL}
    losses = measure_losses(
        evaluation.loaded, programs, split.tasks, split.samples, split.seed, progress,
        protocol=split.protocol, max_length=split.max_length,
    )  # fmt: skip
    if file is not None:
        write_json(file, list(map(asdict, losses)))
    return losses


def read_losses(path: Path) -> list[LayerLoss]:
    """Read the losses stored in a run; UsageError if the file is damaged."""
    return validate_content(TypeAdapter(list[LayerLoss]).validate_python, read_json(path), str(path))


# --- headroom ---------------------------------------------------------------------------------------------------------


class HeadroomOptions(ModelOptions, WorkerOptions, TaskOptions, Seeded):
    """Options of `headroom`: the ratio to evict, and tasks."""

    model: str = option(..., MODEL)
    ratio: Annotated[float, AfterValidator(lambda ratio: Size(ratio=ratio).ratio)] = option(0.8, RATIO)
    samples: Samples = option(20, SAMPLES_OPTION)
    output: Path | None = option(None, OUTPUT_OPTION)
    force: bool = option(False, "Start the run in --output anew.", recorded=False)


def estimate_headroom(options: HeadroomOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast `headroom`; errors as `measure_headroom`."""
    from kvsearch.evaluation.headroom import estimate_headroom

    full = _full_cache(options, reporter, models)
    stated = {"tasks": [task.task.name for task in full.encoded], "ratio": options.ratio, "samples": options.samples}
    stages = [full.cost("full cache"), estimate_headroom(full.loaded, full.encoded, options.ratio)]
    return Forecast(stated, stages, full.loaded.model)


@job(HeadroomOptions)
def headroom(options: HeadroomOptions, reporter: Reporter, models: ModelLoader) -> HeadroomResult:
    """Evict by true importance, by simple policies and at random, and compare with the full cache.

    With `output`, a run that is interrupted goes on where it stopped when the same call is repeated.

    Raises:
        UsageError: there are no such tasks, or another run is in `output`.
        IncompatibleError: the model cannot be loaded, a context does not fit it, or the full cache itself scores next
            to nothing.
    """
    full = _full_cache(options, reporter, models)
    from kvsearch.evaluation.headroom import PROGRAMS
    from kvsearch.evaluation.headroom import measure_headroom as measure
    from kvsearch.tasks.encode import name_contexts

    config = full.stage_config("headroom", ratio=options.ratio).changed(options=options.to_recipe())
    with open_replies(options.output, config, (1 + PROGRAMS) * full.replies, reporter, options.force) as store:
        with reporter.progress("asking the full cache: context") as progress:
            replies = full.require_answers(progress, store)
        with reporter.progress("measuring importance: context") as progress:
            results = measure(full.loaded, full.encoded, options.ratio, replies, progress, store)
        rows = summarize(results, FULL, name_contexts(full.encoded))
        coverage = tuple(task.coverage for task in full.encoded)
        result = HeadroomResult(
            model=options.model, ratio=options.ratio, methods=tuple(rows[-1].scores), rows=tuple(rows), asked=coverage
        )
        if options.output is not None:
            write_json(options.output / REPORT, result.as_json())
    return result


def _full_cache(options: HeadroomOptions, reporter: Reporter, models: ModelLoader) -> Evaluation:
    """Prepare the evaluation of the full cache, with the model."""
    tasks = options.find_tasks(options.model)
    if options.output is not None:
        read_run(options.output, "headroom")
    from kvsearch.evaluation.compare import Split, prepare
    from kvsearch.evaluation.ready_methods import make_full_cache_method

    loaded = models.load(options.model)
    full = prepare(loaded, [make_full_cache_method(loaded)], FULL, Split(tasks, options.samples, seed=options.seed))
    warn_about_coverage(reporter, full.encoded)
    return full
