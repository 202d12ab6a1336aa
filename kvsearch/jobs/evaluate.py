"""kvsearch evaluate: methods and plans on the same samples, or a text, at the same number of entries."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import TypeAdapter

from kvsearch.config.options import RULE, SIZE, Commas, Repeated, option
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Samples
from kvsearch.core.files import check_output
from kvsearch.core.parsing import read_json, validated
from kvsearch.core.progress import Progress
from kvsearch.evaluation.samples import LayerLoss, write_samples
from kvsearch.jobs.groups import (
    ASKED,
    KEPT,
    OUTPUT_OPTION,
    SAMPLES_OPTION,
    WithModel,
    WithProtocol,
    WithTasks,
    WithWorkers,
)
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import FINISHED, Reporter, open_replies, warn_of_coverage
from kvsearch.plan import load_plan
from kvsearch.report.costs import Forecast
from kvsearch.report.evaluation import write_tables
from kvsearch.report.table import check_table_file
from kvsearch.results.evaluation import EvaluationResult, PerplexityResult
from kvsearch.runs.identity import LOSSES, REPORT, SAMPLES, TABLES
from kvsearch.runs.run import run_in, write_json
from kvsearch.strategies.names import FULL
from kvsearch.tasks.windows import PerplexityText

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.strategies.compared import Request
    from kvsearch.tasks.base import Task

PERPLEXITY = "ppl:"  # what a spec of tasks begins with that asks for the perplexity of a text
CONTEXT = 1024  # tokens, of a text
CONTINUATION = 128
NOT_OF_TEXTS = (
    "subject", "protocol", "max_length", "max_memory", "output", "force", "table", "losses",
)  # fmt: skip


class EvaluateOptions(WithModel, WithWorkers, WithTasks, WithProtocol):
    """What is compared, what is asked, and what is kept."""

    job: ClassVar[str] = "evaluate"
    recipes: ClassVar[bool] = True
    panel: ClassVar[str] = "What is compared"

    plan: Annotated[tuple[Path, ...], Repeated] = option((), "A plan file; repeatable.", SIZE, repeated=True)
    samples: Samples = option(20, SAMPLES_OPTION)
    methods: Commas | None = option(
        None,
        "Methods to compare: uniform, pyramid, adakv, ada-pyramid, cake, lava, lava-uniform, lava-pyramid, "
        "lava-equal-heads, defensivekv, layer-defensivekv, any policy (with even budgets), random; METHOD:POLICY "
        "puts another policy under a method's budgets, NAME=DIR looks budgets up in a profile of `calibrate`.",
        SIZE,
        metavar="NAME,...",
        completes="kvsearch.strategies.names:method_names",
    )
    budgets: Commas | None = option(
        None, "Sizes of the methods: entries per kv head, on average.", SIZE, metavar="N,..."
    )
    ratios: Commas | None = option(None, "Sizes of the methods: shares of the prompt to evict.", SIZE, metavar="R,...")
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
    subject: str | None = option(
        None,
        "The method (or plan, by its file's name) that all others are compared with.",
        metavar="NAME",
        shown="the first",
    )
    split: str | None = option(
        None,
        "Part of the examples: train, select, report or all; synthetic has calibrate in place of all.",
        panel=ASKED,
        shown="synthetic and ruler: report, others: all",
    )
    continuation: int | None = option(
        None, "--tasks ppl:FILE: tokens to predict after each context.", panel=ASKED, shown="128", ge=1
    )
    stride: int | None = option(
        None,
        "--tasks ppl:FILE: tokens from one context's beginning to the next.",
        panel=ASKED,
        shown="no overlap",
        ge=1,
    )
    output: Path | None = option(None, replace(OUTPUT_OPTION, panel=KEPT))
    force: bool = option(False, "Start the run in --output anew; replace --table.", panel=KEPT, recorded=False)
    table: Path | None = option(
        None,
        "Write the tables to this .md or .tex file, or every number of them to this .csv file.",
        metavar="FILE",
        panel=KEPT,
        recorded=False,
    )
    losses: bool = option(
        False, "Also measure what every layer's attention output loses under every method.", panel=KEPT
    )

    @property
    def is_of_text(self) -> bool:
        """Whether the perplexity of a text is asked for, and no replies."""
        return self.tasks is not None and self.tasks.startswith(PERPLEXITY)

    def request(self) -> Request:
        """Return what is compared, checked; see `read_request` for the errors."""
        from kvsearch.strategies.compared import read_request

        return read_request(
            self.plan, self.methods, self.budgets, self.ratios, self.phases, self.settings, self.baselines, self.subject
        )

    def check_files(self) -> None:
        """Raise UsageError if the run or the table cannot be written, or the table is there already and would be lost.

        A finished run that is repeated finds the table that it has written itself.
        """
        if self.output is not None:
            run_in(self.output, "evaluate")
        if self.force and self.output is self.table is None:
            raise UsageError("--force is for --output and --table: there is nothing to replace")
        if self.table is None:
            return
        check_table_file(self.table)
        is_finished = self.output is not None and (self.output / REPORT).exists() and not self.force
        if not is_finished:
            check_output(self.table, self.force)


def dry_run(options: EvaluateOptions, reporter: Reporter) -> Forecast:
    """Return what would be compared and asked, and what that costs; errors as `evaluate` before it asks.

    Perplexity is checked without the model.
    """
    if options.is_of_text:
        request, text, context, continuation = _read_text(options)
        content = {"text": text.name, "context": context, "continuation": continuation, **request.as_json()}
        return Forecast(content)
    request, evaluation = _prepare(options, reporter)
    content = {
        "tasks": [task.task.name for task in evaluation.encoded], "protocol": options.protocol, **request.as_json(),
        "contexts": sum(task.coverage.contexts for task in evaluation.encoded), "replies": evaluation.replies,
    }  # fmt: skip
    cost = evaluation.cost(f"replies under {len(evaluation.methods)} methods")
    return Forecast(content, [cost], evaluation.loaded.speed)


@job(EvaluateOptions)
def evaluate(options: EvaluateOptions, reporter: Reporter) -> EvaluationResult | PerplexityResult:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With `output`, a run that is interrupted goes on where it stopped when the same call is repeated. Tasks "ppl:FILE"
    measure perplexity: contexts are compressed, what follows them is predicted. The first of `notes` says so where the
    full cache itself scores next to nothing.

    Raises:
        UsageError: options that do not go together, or files that cannot be read or written.
        IncompatibleError: plans, profiles or questions do not fit the model.
    """
    if options.is_of_text:
        return _measure_text(options, reporter)
    _, evaluation = _prepare(options, reporter)
    directory = options.output
    config = evaluation.config().changed(options=options.recorded())
    tasks = [task.task for task in evaluation.encoded]
    with (
        open_replies(directory, config, evaluation.replies, reporter, options.force) as (run, store),
        reporter.progress("batches") as progress,
    ):
        earlier = 0 if store is None else store.count
        comparison = evaluation.run(progress, store)
        losses = _output_losses(evaluation, tasks, directory, options.losses, progress)
        result = EvaluationResult.of(comparison, losses)
        if directory is not None:
            write_samples(comparison.samples, directory / SAMPLES)
            write_tables(result, directory / TABLES)
            write_json(directory / REPORT, result.as_json())
        if options.table is not None:
            write_tables(result, options.table, options.force)
        if run is not None and store is not None:
            run.finish()
            if run.state == "finished" and store.count == earlier:
                reporter.say(FINISHED)
    return result


def _prepare(options: EvaluateOptions, reporter: Reporter) -> tuple[Request, Evaluation]:
    """Return what is compared, and the evaluation with its model; warns of what makes it say little."""
    for name in ("continuation", "stride"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} is for --tasks ppl:FILE")
    options.check_files()
    tasks = options.find_tasks(options.model, options.split)
    for path in options.plan:
        load_plan(path)
    request = options.request()
    from kvsearch.evaluation.compare import prepare
    from kvsearch.evaluation.totals import idle_methods

    loaded = options.load(options.model, reporter)
    asked = options.asked_of(tasks, options.samples, options.protocol)
    evaluation = prepare(loaded, request.ready(loaded), request.subject, asked)
    warn_of_coverage(reporter, evaluation.encoded)
    for name, seen in evaluation.seen.items():
        if seen.warning is not None:
            reporter.warn(f"{name}: {seen.warning}")
    if idle := idle_methods(evaluation):
        reporter.warn(
            f"{', '.join(idle)}: nothing is evicted from any prompt, so this is the full cache: keep fewer entries"
        )
    return request, evaluation


def _output_losses(
    evaluation: Evaluation, tasks: list[Task], directory: Path | None, wanted: bool, progress: Progress
) -> list[LayerLoss] | None:
    """Return the output losses of all methods but the full cache, if they are wanted; a kept run measures them once."""
    file = None if directory is None else directory / LOSSES
    if file is not None and file.exists():
        return read_losses(file)
    if not wanted:
        return None
    from kvsearch.evaluation.losses import measure_losses

    settings = evaluation.settings
    programs = {method.label: method.program for method in evaluation.methods if method.name != FULL}
    losses = measure_losses(
        evaluation.loaded, programs, tasks, settings.samples, settings.seed, progress,
        protocol=settings.protocol, max_length=settings.max_length,
    )  # fmt: skip
    if file is not None:
        write_json(file, list(map(asdict, losses)))
    return losses


def read_losses(path: Path) -> list[LayerLoss]:
    """Return the losses that a run has kept; UsageError if the file is damaged."""
    return validated(TypeAdapter(list[LayerLoss]).validate_python, read_json(path), str(path))


# --- perplexity of a text ---------------------------------------------------------------------------------------------


def _read_text(options: EvaluateOptions) -> tuple[Request, PerplexityText, int, int]:
    """Return what is compared, the text, and tokens of a context and of its continuation."""
    others = [name for name in options.task_options(options.split).given if name != "lengths"]
    unread = [name for name in NOT_OF_TEXTS if name in options.model_fields_set] + others
    if unread:
        raise UsageError(f"ppl:FILE takes no --{unread[0].replace('_', '-')}: it prints its result")
    request = options.request()
    lengths = options.length or (CONTEXT,)
    if len(lengths) > 1:
        raise UsageError("ppl:FILE takes one --length, the tokens of a context: measure one after the other")
    text = PerplexityText.load(Path(str(options.tasks).removeprefix(PERPLEXITY)))
    return request, text, lengths[0], options.continuation or CONTINUATION


def _measure_text(options: EvaluateOptions, reporter: Reporter) -> PerplexityResult:
    """Return the loss of `options.samples` windows of a text under every method."""
    request, text, context, continuation = _read_text(options)
    from kvsearch.evaluation.perplexity import measure_perplexity
    from kvsearch.evaluation.runner import environment
    from kvsearch.evaluation.totals import check_totals
    from kvsearch.strategies.compared import different_settings

    loaded = options.load(options.model, reporter)
    methods = request.ready(loaded)
    if remark := different_settings(methods):
        reporter.say(remark)
    check_totals(loaded, methods, [context + len(loaded.tokenizer("")["input_ids"])])
    evicting = [method for method in methods if method.name != FULL]
    with reporter.progress("batches") as progress:
        losses = measure_perplexity(
            loaded, {method.label: method.program for method in evicting}, text, context, continuation,
            stride=options.stride, windows=options.samples, batch=options.batch, seed=options.seed, progress=progress,
        )  # fmt: skip
    return PerplexityResult.of(
        losses,
        model=loaded.name,
        text=text.name,
        context=context,
        continuation=continuation,
        stride=options.stride or context + continuation,
        wanted=options.samples,
        seed=options.seed,
        phases=", ".join(sorted({method.phases for method in evicting})),
        batch=options.batch,
        environment=environment(loaded),
    )
