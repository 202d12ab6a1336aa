"""kvsearch validate: find out which signals of a PolyKV calibration are worth following; options of jobs on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvsearch.calibration.steps import read_calibration_content
from kvsearch.commands.groups import (
    ASKED,
    BUDGET,
    MODEL,
    RATIO,
    SAMPLES_OPTION,
    TASKS,
    BatchOptions,
    ModelOptions,
    TaskOptions,
    WorkerOptions,
    changed_flags,
    format_command,
    list_changed_flags,
)
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import FINISHED_NOTE, Reporter, make_stage_store, warn_about_coverage
from kvsearch.config.options import RULE, Names, option
from kvsearch.core.errors import UsageError, assert_present
from kvsearch.core.fields import Samples
from kvsearch.plan import Size
from kvsearch.plan.origin import ContextRecord, ContextSet
from kvsearch.plan.profile import load_profile
from kvsearch.plan.saved import PROFILE
from kvsearch.plan.schema import Protocol
from kvsearch.report.costs import Forecast
from kvsearch.results.validation import VALIDATION_FILE, ValidationResult, load_validation
from kvsearch.runs.identity import CONFIG, RunConfig
from kvsearch.runs.run import Run, require_same, require_unchanged
from kvsearch.signals.table import SignalTable

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel
    from kvsearch.selection.plan_race import PlanRace

JUDGED = "What is judged"
HOW = "run `kvsearch calibrate MODEL --method polykv -o DIR` first"


class SignalOptions(TaskOptions, ModelOptions, WorkerOptions, BatchOptions):
    """Options of jobs on a PolyKV calibration, with tasks for its model."""

    recipes: ClassVar[bool] = True

    directory: Path = option(..., "Directory that `calibrate --method polykv` wrote.", metavar="DIR", argument=True)
    model: str | None = option(None, MODEL, argument=False, metavar="MODEL", shown="as calibrated")
    ratio: float | None = option(None, RATIO)
    protocol: Protocol | None = option(
        None, "question-agnostic or question-aware; see `evaluate`.", panel=ASKED, shown="that of the calibration"
    )

    @property
    def measured(self) -> str | None:
        """The name of the measured model; None if unknown."""
        return _stated(self.directory, "model") if self.model is None else self.model

    @cached_property
    def table(self) -> SignalTable:
        """The signals that were measured.

        Raises:
            UsageError: there is no such directory or no profile in it, or the profile is damaged or has no signals.
        """
        path = self.directory / PROFILE
        if not path.exists():
            what = "does not exist"
            if self.directory.exists():
                what = f"has no {PROFILE}" if self.directory.is_dir() else "is a file"
            raise UsageError(f"{self.directory} {what}: give the directory of a finished calibration, or {HOW}")
        return SignalTable(load_profile(path))

    @property
    def used(self) -> ContextSet:
        """The contexts that were fitted on."""
        return (self.table.profile.metadata.provenance.contexts or ContextRecord()).used

    @property
    def asked_protocol(self) -> Protocol:
        """The protocol of questions, by default the one of the calibration."""
        return self.protocol or self.table.axes.protocol

    def stated_loading(self) -> dict[str, Any]:
        """Return the dtype and revision that were measured, as far as no others are given."""
        dtype = _stated(self.directory, "dtype") if self.dtype == "auto" else None
        is_other = self.revision is not None or self.model is not None
        stated = {"dtype": dtype, "revision": None if is_other else _stated(self.directory, "revision")}
        return {name: value for name, value in stated.items() if value is not None}

    def load_calibrated(self, models: ModelLoader) -> LoadedModel:
        """Load the model of the calibration, in the dtype and revision that were measured unless others are given.

        Raises:
            UsageError: which model it is cannot be told.
            IncompatibleError: it is another model than the one that was measured.
            EnvironmentFault: it cannot be loaded here.
        """
        if self.measured is None:
            raise UsageError(f"{self.directory / CONFIG} does not say which model was calibrated: give --model")
        loaded = models.load(self.measured, **self.stated_loading())
        self.table.profile.metadata.model.require(loaded.fingerprint, f"the profile in {self.directory}")
        return loaded


def _stated(directory: Path, name: str) -> str | None:
    """Read a setting of the measured model from the configuration of a calibration; None if it has none."""
    value = read_calibration_content(directory).get(name)
    return value if isinstance(value, str) else None


class ValidateOptions(SignalOptions):
    """Options of `validate`: signals, sizes and questions."""

    job: ClassVar[str] = "validate"
    alternatives: ClassVar[tuple[str, ...]] = ("budget", "ratio")

    budget: int | None = option(None, BUDGET, shown="those that were measured, one by one", ge=1)
    phases: Names | None = option(
        None,
        "When strategies evict: prefill, decode, both; each is judged by itself.",
        metavar="NAME,...",
        panel=JUDGED,
        shown="all that were measured",
    )
    signals: Names | None = option(
        None,
        "Signals to judge, as routes or for budgets: cosine, ppl, entropy, error, nll, ppl-chosen and others; "
        "route:NAME and budgets:NAME say which of the two.",
        RULE,
        metavar="NAME,...",
        panel=JUDGED,
        shown="routes cosine,ppl and budgets entropy,ppl-chosen, as far as they were measured",
    )
    permutations: int = option(
        5,
        "Random controls of every signal, at least 5; for budgets all other orders of the layers, if there are "
        "fewer. From 19 on the rank among them decides.",
        panel=JUDGED,
        ge=5,
    )
    split: str = option("select", "Part of the examples: select or train, never what is reported on.", panel=TASKS)
    samples: Samples = option(20, SAMPLES_OPTION)
    force: bool = option(False, "Start anew, whatever was found before.", recorded=False)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directory of the calibration, which is not made if it is not there."""
        return (self.directory,) if self.directory.is_dir() else ()


def remarks(options: ValidateOptions, result: ValidationResult) -> Iterator[str]:
    """Yield where the verdicts are kept, and the command to choose by them."""
    yield f"kept in {options.directory / VALIDATION_FILE}"
    sizes = [f"{at.budget:g}" for at in result.budgets if at.ratio is None]
    if sizes:
        size = ("--budget", sizes[0]) if len(sizes) == 1 else ("--budgets", ",".join(sizes))
        flags = (*list_changed_flags(options, ("model",)), *changed_flags(options))
        yield format_command("select", options.directory, *size, "-o", options.directory / "selected.json", *flags)


def dry_run(options: ValidateOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast the work of `validate`; errors as `validate` before any evaluation."""
    races = _prepare(options, reporter, models)
    conditions = describe_conditions(races[0])
    if not options.force:
        require_same((options.directory / VALIDATION_FILE).parent, _config(options, conditions))
    content = {
        "tasks": list(conditions["tasks"]),
        "split": conditions["split"],
        "protocol": conditions["protocol"],
        "signals": [use._asdict() for use in races[0].candidate_set.signals],
    }
    stages = [race.prepared.cost(f"replies at {race.mean_budget:g} entries") for race in races]
    return Forecast(content, stages, races[0].prepared.loaded.model)


@job(ValidateOptions)
def validate(options: ValidateOptions, reporter: Reporter, models: ModelLoader) -> ValidationResult:
    """Score the strategy of every signal against its inverse, a uniform strategy and random ones of the same size.

    Verdicts are kept in the directory validation of the calibration, with finished replies, so the same call goes on
    where it stopped, and other signals and sizes join the earlier verdicts: all of them are returned.

    Raises:
        UsageError: no calibration, signals that were not measured, too few questions or controls, or a validation by
            other questions that is kept there.
        IncompatibleError: model, profile and questions do not fit together, or the full cache itself scores next to
            nothing.
    """
    races = _prepare(options, reporter, models)
    conditions = describe_conditions(races[0])
    path = options.directory / VALIDATION_FILE
    if not options.force:
        require_unchanged(path.parent, path.name, "restore it, or --force to start anew")
    config = _config(options, conditions)
    with Run.open(path.parent, config, force=options.force, files=(path.name, "[0-9r]*-question-*")) as run:
        before = validation_result = load_validation(path)
        for race in races:
            many = f"{len(race.prepared.methods) - 1} strategies and the full cache"
            reporter.say(f"{many} at {race.mean_budget:g} entries per kv head: {race.prepared.replies} replies")
            store = make_stage_store(run.directory, race.config, reporter)
            result = ValidationResult(**conditions, budgets=(race.judge_signals(store, answered=True),))
            validation_result = result if validation_result is None else result.merged(validation_result)
            run.write(path.name, validation_result.as_json())
        run.finish()
    assert validation_result is not None
    if validation_result == before:
        reporter.say(FINISHED_NOTE)
    return validation_result


def describe_conditions(race: PlanRace) -> dict[str, Any]:
    """Describe the profile and questions of a validation, which must be equal for two of them to be merged."""
    evaluation = race.prepared
    profile = assert_present(race.candidate_set.profile, "signals are those of a profile")
    splits = {str(task.task.split) for task in evaluation.encoded if hasattr(task.task, "split")}
    tasks = evaluation.config().content["tasks"]
    return {
        "model": profile.metadata.model,
        "profile_sha256": profile.sha256,
        "tasks": {
            name: {**{key: tasks[name][key] for key in ("contexts", "questions", "rows_sha256")}, "metric": metric}
            for name, metric in evaluation.metrics.items()  # in the order in which they were asked for
        },
        "split": ", ".join(sorted(splits)) or None,
        "protocol": evaluation.split.protocol,
        "seed": evaluation.split.seed,
    }


def _config(options: ValidateOptions, conditions: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the run: validations of other signals and sizes are the same one."""
    content = {name: value for name, value in conditions.items() if name != "model"}  # the profile has it
    return RunConfig(job="validate", options=options.to_recipe(), content=content)


def _prepare(options: ValidateOptions, reporter: Reporter, models: ModelLoader) -> list[PlanRace]:
    """Check all options and load the model; prepare the race of strategies and controls at every size."""
    tasks = options.find_tasks(options.measured, options.split)
    from kvsearch.selection.signal_controls import find_uses, prepare_signal_race
    from kvsearch.selection.splits import refuse_reported

    refuse_reported(tasks)
    table = options.table
    uses = find_uses(table, options.signals, options.phases)
    sizes = [Size(budget=measured) for measured in table.axes.budgets]
    if options.budget is not None or options.ratio is not None:
        sizes = [Size(options.budget, options.ratio)]
    split = options.make_split(tasks, options.samples, options.asked_protocol).without(options.used)
    loaded = options.load_calibrated(models)
    races = [prepare_signal_race(loaded, table.profile, size, split, uses, options.permutations) for size in sizes]
    warn_about_coverage(reporter, races[0].encoded)
    for note in dict.fromkeys(note for race in races for note in race.candidate_set.notes):
        reporter.warn(note)
    return races
