"""kvsearch reproduce: make a table of a paper again, on any model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.commands.groups import (
    ASKED,
    BUDGETS,
    LOADING,
    MODEL,
    TASK_DETAILS,
    BatchOptions,
    BudgetList,
    ModelOptions,
    TaskOptions,
    WorkerOptions,
)
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import FINISHED_NOTE, Reporter, show_stages
from kvsearch.config.options import QUESTIONS, RESULT, JobOptions, Specs, option
from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.fields import Samples
from kvsearch.core.files import write_atomically
from kvsearch.models.loading import BUNDLED, LoadedModel
from kvsearch.models.work import StageCost, Work
from kvsearch.papers.tables import ASKING, STAGES, Ask, PaperTable, Scale, Stage, find_table, model_of
from kvsearch.plan.saved import PROFILE
from kvsearch.report.artifacts import open_path
from kvsearch.report.costs import Forecast
from kvsearch.report.paper_table import ReproducedTable, make_reproduced_table
from kvsearch.report.table import to_latex, to_markdown
from kvsearch.results.search import read_trace
from kvsearch.results.validation import VALIDATION_FILE as VALIDATION
from kvsearch.runs.identity import LEDGER, PLAN, REPORT, SELECTION
from kvsearch.runs.lock import require_lock
from kvsearch.runs.run import finish_run, mark_unfinished
from kvsearch.tasks.base import Task
from kvsearch.tasks.catalog import describe_tasks, find_tasks

RUNS = Path("runs") / "reproduce"
TABLE_SUFFIXES = ".json", ".csv", ".md", ".tex"
DECIDING = ("model", "seed", "max_length", "dtype", "revision")  # what every stage depends on
MADE: frozenset[str] = frozenset({"scale", "uniform", "pyramid", "export"})  # a plan file, made in a moment
REUSED_JOBS: frozenset[str] = frozenset({"evolve", "select", "bench"})  # what is finished is not run again


# what a stage has found, by its job: a file in its directory
RESULTS: Mapping[str, str] = {
    "calibrate": PROFILE, "evolve": PLAN, "select": SELECTION, "validate": str(VALIDATION), "evaluate": REPORT,
    "bench": "costs.json",
}  # fmt: skip
LAST = {**RESULTS, "evolve": REPORT}  # the last file that it writes


class ReproduceOptions(TaskOptions, ModelOptions, WorkerOptions, BatchOptions):
    """Options of `reproduce`: the table, the model, and changes to the paper's setup."""

    table: str = option("", "A table, such as lukv-table1; --list has them all.", metavar="TABLE", argument=True)
    model: str = option("", MODEL)
    output: Path | None = option(
        None,
        "Directory of the tables and their stages, which tables share.",
        RESULT,
        short="-o",
        metavar="DIR",
        shown=f"{RUNS}/MODEL",
        recorded=False,
    )
    listed: bool = option(
        False, "List the tables, or describe one, and stop.", QUESTIONS, flag="--list", recorded=False
    )
    tasks: Specs | None = option(
        None,
        "Ask these, and search on them, in place of the table's own: as for evaluate.",
        QUESTIONS,
        metavar="SPEC",
        shown="those of the table",
    )
    samples: Samples | None = option(None, "Contexts per task.", QUESTIONS, panel=ASKED, shown="those of the table")
    budgets: BudgetList = option(None, BUDGETS, help="Entries per kv head.", panel=ASKED, shown="those of the table")

    @property
    def place(self) -> Path:
        """The directory of the tables."""
        return self.output or RUNS / self.model.rstrip("/").rpartition("/")[2]

    @property
    def directories(self) -> tuple[Path, ...]:
        return (self.place,) if self.model else ()

    @property
    def is_short(self) -> bool:
        """Whether the table has its short form: that is for the bundled models."""
        return self.model in BUNDLED

    def chosen_table(self) -> PaperTable:
        """Return the table; UsageError if there is none of that name, or no model."""
        if not self.table:
            raise UsageError("which table? Give its name and a model; kvsearch reproduce --list names all")
        table = find_table(self.table)
        if not self.model:
            raise UsageError(f"{table.name} of which model? Give a hub id, a local directory or bundled")
        return table

    def scale(self, table: PaperTable) -> Scale:
        """Return the scale of the evaluation: that of the table for this model, with given options replaced."""
        scale = table.bundled if self.is_short else table.paper
        if self.length and "lengths" in scale:  # of prompts that are measured
            scale = {**scale, "lengths": self.length}
        given = {"asks": self._asks(scale["asks"]), "searches": self._asks(scale["searches"], search=True)}
        if self.budgets is None:
            return {**scale, **given}
        if not scale["budgets"]:
            raise UsageError(f"{table.name} evicts shares of the prompts: leave --budgets out")
        if len(self.budgets) != len(scale["budgets"]) and len(scale["budgets"]) == 1:
            raise UsageError(f"{table.name} has one budget: give one with --budgets")
        return {**scale, **given, "budgets": sorted(self.budgets)}

    def _asks(self, asks: Sequence[Ask], search: bool = False) -> list[Ask]:
        """Return the evaluations in place of `asks`, each once; a search keeps its own number of samples."""
        given: dict[str, Any] = {"tasks": self.tasks, "samples": None if search else self.samples}
        given = {name: value for name, value in given.items() if value is not None}
        changed: list[Ask] = []
        for ask in asks:
            length = self.length or (None if self.tasks else ask.get("length"))
            own = {name: value for name, value in ask.items() if name != "length"} | given
            if length and "length" in list_read_options(own["tasks"]):
                own["length"] = length
            if own not in changed:
                changed.append(own)
        return changed


def list_read_options(spec: str) -> set[str]:
    """List the options that the tasks of a spec read, by field name; UsageError for an unknown task."""
    return {option for entry in describe_tasks(spec) for option in entry.reads}


# --- stages -----------------------------------------------------------------------------------------------------------


def find_job(name: str) -> tuple[type[JobOptions], Callable[..., Any]]:
    """Find the options and the function of a stage's job."""
    from kvsearch.commands import bench, calibrate, evaluate, evolve, export, plan, select, validate

    jobs: dict[str, tuple[type[JobOptions], Callable[..., Any]]] = {
        "bench": (bench.BenchOptions, bench.bench),
        "calibrate": (calibrate.CalibrateOptions, calibrate.calibrate),
        "evaluate": (evaluate.EvaluateOptions, evaluate.evaluate),
        "evolve": (evolve.EvolveOptions, evolve.evolve),
        "export": (export.ExportOptions, export.export),
        "pyramid": (plan.PyramidOptions, plan.pyramid),
        "scale": (plan.ScaleOptions, plan.scale),
        "select": (select.SelectOptions, select.select),
        "uniform": (plan.UniformOptions, plan.uniform),
        "validate": (validate.ValidateOptions, validate.validate),
    }
    return jobs[name]


class TableStages:
    """The stages of a table on one model, in their order, each run by the job that it names and kept by its options.

    `finished` are those that were run; `impossible` says why the model has none of a stage, by its name.

    Raises:
        UsageError: unknown tasks, or details of tasks that none of the stages reads.
    """

    def __init__(self, options: ReproduceOptions, stages: Sequence[Stage]) -> None:
        self.options = options
        self.all = tuple(stages)
        self.keys: dict[str, str] = {}
        self.finished: list[Stage] = []
        self.impossible: dict[str, str] = {}
        for stage in self.all:
            self.keys[stage.name] = self._key(stage)
        read = {option for stage in self.asking for option in list_read_options(stage.options["tasks"])}
        read |= {"length" for stage in self.all if stage.job == "bench"}
        for stage in self.asking:
            self.tasks_of(stage)
        for name in TASK_DETAILS:
            if getattr(options, name) is not None and name not in read:
                raise UsageError(f"--{name.replace('_', '-')}: no task of {options.table} reads it, leave it out")

    @property
    def asking(self) -> list[Stage]:
        """Stages that evaluate tasks."""
        return [stage for stage in self.all if stage.job in ASKING]

    def tasks_of(self, stage: Stage) -> list[Task]:
        """Return the tasks of a stage, of its split, or of one of several splits."""
        options = stage.options
        made_of = {"length": options.get("length"), "split": options.get("split"), **self._details(stage)}
        return find_tasks(options["tasks"], made_of)

    def _details(self, stage: Stage) -> dict[str, Any]:
        """Return the options but lengths that say what tasks are made of, those that these tasks read."""
        read = list_read_options(stage.options["tasks"]) - {"length"}
        given = {name: getattr(self.options, name) for name in TASK_DETAILS if name in read}
        return {name: value for name, value in given.items() if value is not None}

    def require_data(self, loaded: LoadedModel) -> None:
        """Find out before the first stage whether the rows of all tasks are here: a context of each is read."""
        from kvsearch.tasks.encode import make_token_counter

        for task in (task for stage in self.asking for task in self.tasks_of(stage)):
            task.examples(1, self.options.seed, make_token_counter(loaded.tokenizer))

    def _key(self, stage: Stage) -> str:
        """Return a short hash of all options of a stage, including earlier stages."""
        content = {
            "job": stage.job, "options": _filled(stage.options, self.keys),
            "methods": _filled(stage.methods, self.keys),
            "details": self._details(stage) if stage.job in ASKING else {},
            **{name: getattr(self.options, name) for name in DECIDING},
        }  # fmt: skip
        return sha256(canonical_json(_filled(content, {}))).hexdigest()[:8]

    # --- where they are kept ------------------------------------------------------------------------------------------

    def place(self, stage: Stage) -> Path:
        """Return the directory of a stage, or its file; a validation is kept with its calibration."""
        if stage.job in MADE:
            return self.plan_file(stage)
        name = "polykv" if stage.job == "validate" else stage.name
        return self.options.place / STAGES / f"{name}-{self.keys[name]}"

    def plan_file(self, stage: Stage) -> Path:
        """Return the plan file of a stage, named after it, as evaluations refer to it."""
        return self.options.place / "plans" / self.keys[stage.name] / f"{stage.name}.json"

    def output(self, stage: Stage) -> Path:
        """Return the output of a stage for later ones: the directory of a profile, or a plan."""
        if stage.job == "select":
            return self.plan_file(stage)
        return self.place(stage) / (PLAN if stage.job == "evolve" else "")

    @property
    def outputs(self) -> dict[str, str]:
        """Outputs of stages by name."""
        return {stage.name: str(self.output(stage)) for stage in self.all}

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, stage: Stage, loaded: LoadedModel, reporter: Reporter) -> None:
        """Run a stage, or read its results; a stage that the model cannot do is noted in `impossible`."""
        left_out: dict[str, str] = {}
        remarks: Sequence[str] = ()
        usable = stage
        if stage.job == "evaluate":
            usable, left_out = self.usable(stage, loaded)
        elif (lost := self._lost(stage.options)) is not None:
            self.impossible[stage.name] = lost
            return
        place = self.place(stage)
        is_finished = stage.job in REUSED_JOBS and (place / LAST[stage.job]).exists() and self.output(stage).exists()
        if not is_finished:
            kind, run = find_job(stage.job)
            try:
                options = kind.of(**self._given(usable, kind.model_fields.keys()))
                if isinstance(options, PolykvOptions):
                    remarks = options.remarks()
                made = run(options, reporter=reporter, loaded=loaded)
                if stage.job == "bench":  # which writes no file
                    place.mkdir(parents=True, exist_ok=True)
                    write_atomically(place / LAST["bench"], canonical_json(made.as_json()))
            except IncompatibleError as error:
                if stage.job != "calibrate":
                    raise
                self.impossible[stage.name] = str(error)
                return
        result = open_path(place / RESULTS.get(stage.job, "")).content
        trace = read_trace(place / LEDGER) if stage.job == "evolve" else None
        self.finished.append(replace(stage, result=result, left_out=left_out, remarks=remarks, trace=trace))

    def _lost(self, value: object) -> str | None:
        """Return why the result of an earlier stage in the options is missing; None if all exist."""
        text = json.dumps(value, default=str)
        return next((why for name, why in self.impossible.items() if f"{{{name}}}" in text), None)

    def _given(self, stage: Stage, fields: Collection[str]) -> dict[str, Any]:
        """Return all options of a stage's job, which has these `fields`; the folder of a plan is made."""
        own = self.options
        output = self.output(stage)
        named = {*LOADING, "model", "seed", "max_length"} & set(fields)
        given = {**{name: getattr(own, name) for name in named}, **_filled(stage.options, self.outputs)}
        if output == self.plan_file(stage):
            require_lock(own.place)
            output.parent.mkdir(parents=True, exist_ok=True)
        if stage.job in MADE:
            given["force"] = True
        if stage.job in ASKING:
            given |= {**self._details(stage), "batch": own.batch, "max_memory": own.max_memory}
        if stage.job == "select":
            return {**given, "output": output, "run": self.place(stage), "force": output.exists()}
        if stage.job == "evaluate":
            given["methods"] = ",".join(_filled(stage.methods, self.outputs))
        return {**given, "output": self.place(stage)} if "output" in fields else given

    def usable(self, stage: Stage, loaded: LoadedModel) -> tuple[Stage, dict[str, str]]:
        """Return an evaluation without the methods that the model cannot run, and why it cannot, by their names.

        Raises:
            IncompatibleError: it can run none of them.
        """
        from kvsearch.evaluation.methods import parse_methods, parse_sizes
        from kvsearch.runtime.cache import check_rotary

        options = stage.options
        lost = {method: self._lost(method) for method in stage.methods}
        left_out = {method.partition("=")[0]: why for method, why in lost.items() if why is not None}
        kept = [method for method, why in lost.items() if why is None]
        plans = tuple(plan for plan in options.get("plan", ()) if self._lost(plan) is None)
        methods = parse_methods(",".join(_filled(kept, self.outputs)), options.get("settings", ())) if kept else []
        sizes = parse_sizes(options.get("budgets"), options.get("ratios"))
        for method in methods:
            try:
                method.check(sizes)
                check_rotary(loaded.model, [method.policy])
                for size in sizes:
                    method.program(loaded, size, options.get("phases", "prefill"))
            except UsageError as error:
                left_out[method.name] = str(error)
        usable = tuple(text for text, method in zip(kept, methods, strict=True) if method.name not in left_out)
        if not usable:
            raise IncompatibleError(f"this model can run none of the methods: {next(iter(left_out.values()))}")
        return replace(stage, methods=usable, options={**options, "plan": plans}), left_out

    # --- what they read -----------------------------------------------------------------------------------------------

    def describe(self, stage: Stage) -> dict[str, Any]:
        """Describe a stage: its job, its directory, and whether it is finished."""
        place = self.place(stage)
        is_finished = stage.job != "validate" and (place / LAST.get(stage.job, "")).exists()
        state = "finished" if is_finished else "begun" if place.exists() else "to do"
        said = {"name": stage.name, "job": stage.job, "what": stage.words, "kept": str(place), "state": state}
        return {**said, "options": dict(stage.options)}

    def count_contexts(self, stage: Stage) -> int:
        """Return how many contexts a stage reads, at most, on all splits that it asks."""
        if stage.job not in ASKING:
            return 0
        splits = {"evolve": 3, "select": 2}.get(stage.job, 1)
        return splits * len(self.tasks_of(stage)) * int(stage.options["samples"])


def _filled(value: Any, outputs: Mapping[str, str]) -> Any:
    """Return options with what earlier stages give in the place of their names in braces."""
    text = json.dumps(value, default=str)
    for name, path in outputs.items():
        text = text.replace(f"{{{name}}}", json.dumps(path)[1:-1])
    return json.loads(text)


# --- the job ----------------------------------------------------------------------------------------------------------


def dry_run(options: ReproduceOptions, reporter: Reporter, models: ModelLoader) -> Forecast:  # noqa: ARG001 - as others have it
    """Forecast the stages and the contexts they read.

    Of the model its configuration and tokenizer are read, of all tasks a context; errors as `reproduce`.
    """
    table = options.chosen_table()
    stages = TableStages(options, table.stages(options.scale(table)))
    stages.require_data(models.load_shape(options.model))
    content = {
        "table": table.name, "model": options.model, "directory": str(options.place),
        "paper_numbers": model_of(table, options.model) is not None,
        "stages": list(map(stages.describe, stages.all)),
    }  # fmt: skip
    costs = [
        StageCost(f"{stage.name} ({stages.describe(stage)['state']})", stages.count_contexts(stage), 0, Work())
        for stage in stages.all
    ]
    return Forecast(content, costs)


@job(ReproduceOptions)
def reproduce(options: ReproduceOptions, reporter: Reporter, models: ModelLoader) -> ReproducedTable:
    """Make a table of a paper again: calibrate, search and ask as it did, as far as that is known, on any model.

    Writes TABLE.json, .csv, .md and .tex to the directory; every stage has a directory of its own there, named by its
    options, so that the same call goes on where it stopped and tables share what they have in common. Beside the values
    are the paper's numbers where the model is the paper's.

    Raises:
        UsageError: an unknown table or task, or data that is missing.
        IncompatibleError: the model computes NaN, or it can run none of the methods.
        EnvironmentFault: the disk is full, or the model cannot be loaded here.
    """
    table = options.chosen_table()
    stages = TableStages(options, table.stages(options.scale(table)))
    files = [f"{table.name}{suffix}" for suffix in TABLE_SUFFIXES]
    loaded = models.load(options.model)
    stages.require_data(loaded)
    mark_unfinished(options.place, files)
    work = {stage.name: 1.0 + stages.count_contexts(stage) for stage in stages.all}  # beside each other
    with show_stages(reporter, work, options.place) as whole:
        for stage in stages.all:
            with whole.stage(stage.name) as part:
                stages.run(stage, loaded, part)
    stated = {"model": options.model, "options": options.to_recipe(), "stages": list(map(stages.describe, stages.all))}
    reproduced_table = make_reproduced_table(
        table, stages.finished, stated, short=options.is_short, own_tasks=options.tasks is not None
    )
    tables = reproduced_table.tables()
    place = options.place / files[0]
    before = place.read_bytes() if place.exists() else None
    texts = (
        canonical_json(reproduced_table.as_json()), reproduced_table.csv().encode(),
        "\n".join(map(to_markdown, tables)).encode(), "\n".join(map(to_latex, tables)).encode(),
    )  # fmt: skip
    for name, text in reversed([*zip(files, texts, strict=True)]):
        write_atomically(options.place / name, text)
    finish_run(options.place, files)
    if before == place.read_bytes():
        reporter.say(FINISHED_NOTE)
    return reproduced_table.model_copy(update={"files": tuple(options.place / name for name in files)})
