"""kvsearch evaluate: methods and plans on the same samples, at the same number of entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from kvsearch.config.options import Option, Repeated
from kvsearch.errors import UsageError
from kvsearch.jobs.foretell import foretold
from kvsearch.jobs.groups import ASKED, KEPT, PERPLEXITY, Asking, WithModel, WithTasks, WithWorkers
from kvsearch.jobs.public import job
from kvsearch.jobs.stages import FINISHED, going_on, on_interruption
from kvsearch.jobs.talk import Talk
from kvsearch.progress import Progress

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Comparison, Evaluation
    from kvsearch.evaluation.layer_loss import LayerLoss
    from kvsearch.evaluation.reply_store import ReplyStore
    from kvsearch.jobs.perplexity import MeasuredPerplexity
    from kvsearch.report.evaluation import Columns
    from kvsearch.strategies.request import Request
    from kvsearch.tasks.base import Task

COMPARED = "What is compared"


class EvaluateOptions(WithModel, WithWorkers, WithTasks, Asking):
    """What is compared, what is asked, and what is kept."""

    job: ClassVar[str] = "evaluate"
    recipes: ClassVar[str | None] = "recipes/evaluate"

    plan: Annotated[tuple[Path, ...], Repeated, Option("A plan file; repeatable.", panel=COMPARED, repeated=True)] = ()
    methods: Annotated[
        str | None,
        Option(
            "Methods to compare: uniform, pyramid, adakv, ada-pyramid, cake, lava, lava-uniform, lava-pyramid, "
            "lava-equal-heads, any policy (with even budgets), random; METHOD:POLICY puts another policy under a "
            "method's budgets, NAME=DIR looks budgets up in a profile of `calibrate`.",
            metavar="NAME,...",
            panel=COMPARED,
        ),
    ] = None
    budgets: Annotated[
        str | None,
        Option("Sizes of the methods: entries per kv head, on average.", metavar="N,...", panel=COMPARED),
    ] = None
    ratios: Annotated[
        str | None, Option("Sizes of the methods: shares of the prompt to evict.", metavar="R,...", panel=COMPARED)
    ] = None
    phases: Annotated[
        str | None,
        Option("When the methods evict, all alike: prefill, decode or both.", panel=COMPARED, shown="prefill"),
    ] = None
    settings: Annotated[
        tuple[str, ...],
        Repeated,
        Option(
            "A setting of all methods that have it (window=8), or of one (lava.window=8); repeatable.",
            flag="--set",
            metavar="KEY=VALUE",
            panel=COMPARED,
            repeated=True,
        ),
    ] = ()
    baselines: Annotated[
        str | None,
        Option(
            "What plans are compared with, at their entries: uniform, snapkv, streaming, random.",
            panel=COMPARED,
            shown="uniform,snapkv,streaming",
        ),
    ] = None
    subject: Annotated[
        str | None,
        Option(
            "The method (or plan, by its file's name) that all others are compared with.",
            metavar="NAME",
            panel=COMPARED,
            shown="the first",
        ),
    ] = None
    split: Annotated[
        str | None,
        Option(
            "Part of the examples: train, select, report or all; synthetic has calibrate in place of all.",
            panel=ASKED,
            shown="synthetic and ruler: report, others: all",
        ),
    ] = None
    continuation: Annotated[
        int | None,
        Field(ge=1),
        Option("--tasks ppl:FILE: tokens to predict after each context.", panel=ASKED, shown="128"),
    ] = None
    stride: Annotated[
        int | None,
        Field(ge=1),
        Option("--tasks ppl:FILE: tokens from one context's beginning to the next.", panel=ASKED, shown="no overlap"),
    ] = None
    output: Annotated[
        Path | None,
        Option(
            "Keep the run here, reply by reply; the same command goes on where it stopped.",
            short="-o",
            metavar="DIR",
            panel=KEPT,
            recorded=False,
        ),
    ] = None
    force: Annotated[
        bool,
        Option("Start the run in --output anew; replace --table and --samples-file.", panel=KEPT, recorded=False),
    ] = False
    reuse: Annotated[
        Path | None,
        Option(
            "Take finished replies from the --output of another run where they would be the same.",
            metavar="DIR",
            panel=KEPT,
            recorded=False,
        ),
    ] = None
    samples_file: Annotated[
        Path | None, Option("Write every reply to this .csv or .parquet file.", panel=KEPT, recorded=False)
    ] = None
    table: Annotated[
        Path | None,
        Option(
            "Write the tables to this .md or .tex file, or every number of them to this .csv file.",
            metavar="FILE",
            panel=KEPT,
            recorded=False,
        ),
    ] = None
    columns: Annotated[
        str | None,
        Option(
            "Columns of the tables: tasks (and means), categories (and averages) or averages.",
            panel=KEPT,
            shown="tasks; on the screen categories if there are many",
        ),
    ] = None
    losses: Annotated[
        bool, Option("Measure, too, what every layer's attention output loses under every method.", panel=KEPT)
    ] = False

    @property
    def directories(self) -> tuple[Path, ...]:
        """See `JobOptions.directories`."""
        return () if self.output is None else (self.output,)

    @property
    def asks_perplexity(self) -> bool:
        """Whether the perplexity of a text is asked for, and no replies."""
        return self.tasks is not None and self.tasks.startswith(PERPLEXITY)

    def request(self) -> Request:
        """Return what is compared, checked; see `read_request` for the errors."""
        from kvsearch.strategies.request import read_request

        return read_request(
            self.plan, self.methods, self.budgets, self.ratios, self.phases, self.settings, self.baselines, self.subject
        )

    def check_files(self) -> None:
        """Raise UsageError if one of the files to write cannot be, or is there already and would be lost.

        A finished run that is repeated finds the files that it has written itself.
        """
        from kvsearch.evaluation.reply_store import REPORT
        from kvsearch.evaluation.samples import check_samples_file
        from kvsearch.plan.files import check_output
        from kvsearch.report.table import check_table_file

        if self.samples_file is not None:
            check_samples_file(self.samples_file)
        if self.table is not None:
            check_table_file(self.table)
        there = None if self.force or self.output is None else self.output
        for path in (self.samples_file, self.table):
            if path is None or (there is not None and (there / REPORT).exists()):
                continue
            if there is not None and there.exists() and path.exists():
                raise UsageError(
                    f"{path} exists: choose another file, or delete it; --force starts the run in {there} anew, too"
                )
            check_output(path, self.force)

    def columns_of_tables(self) -> Columns | None:
        """Return which columns tables have (None: what suits); UsageError if there are no such columns."""
        from kvsearch.report.evaluation import find_columns

        return None if self.columns is None else find_columns(self.columns)


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation, with the output losses of layers where they were measured."""

    comparison: Comparison
    losses: list[LayerLoss] | None
    columns: Columns | None

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found."""
        from kvsearch.report.evaluation import as_json

        return as_json(self.comparison, self.losses)


@job(EvaluateOptions, dry=True)
def dry_run(options: EvaluateOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be compared and asked, and how long that takes, as JSON; errors as `evaluate` before it asks.

    Perplexity is checked without the model.
    """
    if options.asks_perplexity:
        from kvsearch.jobs import perplexity

        return perplexity.dry_run(options)
    request, evaluation = _prepared(options, talk)
    told = {"tasks": [task.task.name for task in evaluation.encoded], "protocol": options.protocol}
    contexts = sum(task.coverage.contexts for task in evaluation.encoded)
    count = {"contexts": contexts, "replies": evaluation.replies}
    return {**told, **request.as_json(), **count, **foretold(evaluation.loaded, evaluation.work, talk)}


@job(EvaluateOptions)
def evaluate(options: EvaluateOptions, talk: Talk) -> Evaluated | MeasuredPerplexity:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With `output`, a run that is interrupted goes on where it stopped when the same call is repeated. Tasks "ppl:FILE"
    measure perplexity: contexts are compressed, what follows them is predicted. The first of `comparison.notes` says so
    where the full cache itself scores next to nothing.

    Raises:
        UsageError: options that do not go together, or files that cannot be read or written.
        IncompatibleError: plans, profiles or questions do not fit the model.
    """
    if options.asks_perplexity:
        from kvsearch.jobs import perplexity

        return perplexity.measure(options, talk)
    from kvsearch.evaluation.reply_store import REPORT, WRITTEN
    from kvsearch.runs.identity import CONFIG
    from kvsearch.runs.sums import finish

    was_finished = options.output is not None and not options.force and (options.output / REPORT).exists()
    _, evaluation = _prepared(options, talk)
    tasks = [task.task for task in evaluation.encoded]
    with _replies(evaluation, options, talk) as store, talk.progress("batches") as progress:
        kept = 0 if store is None else store.count
        comparison = evaluation.run(progress, store)
        losses = _output_losses(evaluation, tasks, options, progress)
        found = Evaluated(comparison, losses, options.columns_of_tables())
        _write(found, options)
        if options.output is not None:
            finish(options.output, (CONFIG, *WRITTEN))
        if was_finished and store is not None and store.count == kept:
            talk.say(FINISHED)
    return found


def _prepared(options: EvaluateOptions, talk: Talk) -> tuple[Request, Evaluation]:
    """Return what is compared, and the evaluation with its model; warns of what makes it say little."""
    from kvsearch.evaluation.check_evicts import idle_methods
    from kvsearch.evaluation.compare import prepare

    request, tasks = _checked(options)
    loaded = options.load(options.model, talk)
    evaluation = prepare(loaded, request.ready(loaded), request.subject, tasks, options.asking(options.protocol))
    for name, seen in evaluation.seen.items():
        if seen.warning is not None:
            talk.warn(f"{name}: {seen.warning}")
    if idle := idle_methods(evaluation):
        talk.warn(
            f"{', '.join(idle)}: nothing is evicted from any prompt, so this is the full cache: keep fewer entries"
        )
    return request, evaluation


def _checked(options: EvaluateOptions) -> tuple[Request, list[Task]]:
    """Return what is compared and what is asked, once all is checked that can be without a model."""
    from kvsearch.evaluation.reply_store import check_run

    for name in ("continuation", "stride"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} is for --tasks ppl:FILE")
    request = options.request()
    check_run(options.output, options.reuse)
    if options.force and options.output is options.samples_file is options.table is None:
        raise UsageError("--force is for --output, --table and --samples-file: there is nothing to replace")
    options.check_files()
    options.columns_of_tables()
    return request, options.find_tasks(options.model, options.split)


@contextmanager
def _replies(evaluation: Evaluation, options: EvaluateOptions, talk: Talk) -> Iterator[ReplyStore | None]:
    """Open the replies of the run, if it is kept; see `going_on`."""
    from kvsearch.evaluation.reply_store import open_run

    if options.output is None:
        with on_interruption(
            talk, lambda: "nothing is kept without --output DIR, with which a run can go on where it stopped"
        ):
            yield None
        return
    config = evaluation.config().with_options(options.recorded())
    with (
        open_run(options.output, config, options.force, options.reuse) as store,
        going_on(options.output, store, evaluation.replies, talk),
    ):
        yield store


def _output_losses(
    evaluation: Evaluation, tasks: list[Task], options: EvaluateOptions, progress: Progress
) -> list[LayerLoss] | None:
    """Return the output losses of all methods but the full cache, if they are wanted; a kept run measures them once."""
    from kvsearch.evaluation.losses import measure_losses
    from kvsearch.evaluation.reply_store import LOSSES
    from kvsearch.runs.directory import write_json
    from kvsearch.strategies.names import FULL

    place = None if options.output is None else options.output / LOSSES
    if place is not None and place.exists():
        return _read_losses(place, evaluation)
    if not options.losses:
        return None
    how = evaluation.settings
    programs = {one.label: one.program for one in evaluation.methods if one.name != FULL}
    losses = measure_losses(
        evaluation.loaded, programs, tasks, how.samples, how.seed, progress,
        protocol=how.protocol, max_length=how.max_length,
    )  # fmt: skip
    if place is not None:
        write_json(place, [asdict(row) for row in losses])
    return losses


def _read_losses(path: Path, evaluation: Evaluation) -> list[LayerLoss]:
    """Return the losses that a run has kept; UsageError if the file is damaged or of something else."""
    from kvsearch.evaluation.layer_loss import LayerLoss
    from kvsearch.plan.files import read_bytes
    from kvsearch.strategies.names import FULL

    remedy = "delete the file and give --losses to measure them again"
    try:
        losses = TypeAdapter(list[LayerLoss]).validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged ({error.errors()[0]['msg']}): {remedy}") from error
    asked = {task.task.name for task in evaluation.encoded}, {one.label for one in evaluation.methods} - {FULL}
    if ({row.task for row in losses}, {row.method for row in losses}) != asked:
        raise UsageError(f"{path} is not of the tasks and methods of this run: {remedy}")
    return losses


def _write(found: Evaluated, options: EvaluateOptions) -> None:
    """Write what is to be kept: the results into the directory of the run, replies and tables into files."""
    from kvsearch.evaluation.reply_store import REPORT, SAMPLES, TABLES
    from kvsearch.evaluation.samples import write_samples
    from kvsearch.report.evaluation import write_tables
    from kvsearch.runs.directory import write_json

    result, columns = found.comparison, found.columns or "tasks"
    if options.output is not None:
        write_samples(result.samples, options.output / SAMPLES)
        write_tables(result, options.output / TABLES, columns)
        write_json(options.output / REPORT, found.as_json())
    if options.samples_file is not None:
        write_samples(result.samples, options.samples_file, options.force)
    if options.table is not None:
        write_tables(result, options.table, columns, options.force)
