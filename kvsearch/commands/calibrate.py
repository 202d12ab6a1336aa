"""kvsearch calibrate: measure which cache entries a model can live without, and write a profile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import create_model
from pydantic.fields import FieldInfo

from kvsearch.calibration.data import find_default_data, load_calibration_data
from kvsearch.calibration.options import CalibrationOptions
from kvsearch.calibration.steps import STEPS_FOLDER, StepCache, count_steps, hash_step_inputs
from kvsearch.calibration.tables import HELD_OUT, MIN_CONTEXTS_TO_JUDGE
from kvsearch.commands.groups import (
    MODEL,
    TASK_DETAILS,
    TASKS,
    ModelOptions,
    RunDirOptions,
    TaskOptions,
    WorkerOptions,
    changed_flags,
    format_command,
    list_changed_flags,
)
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import FINISHED_NOTE, Reporter, on_interruption
from kvsearch.config.options import QUESTIONS, JobOptions, Option, Specs, option
from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.core.fields import Samples
from kvsearch.core.naming import describe_unknown, suggest
from kvsearch.core.parsing import list_problems
from kvsearch.methods.base import CalibratedRun
from kvsearch.models.work import StageCost
from kvsearch.plan.methods import CALIBRATION_METHODS, create_method
from kvsearch.plan.profile import load_profile, save_profile
from kvsearch.plan.saved import PROFILE
from kvsearch.report.costs import Forecast
from kvsearch.runs.identity import CONFIG, CONTEXTS, RunConfig
from kvsearch.runs.run import Run, read_run, read_sums, require_equal, require_unchanged, write_contexts
from kvsearch.tasks.catalog import describe_tasks

if TYPE_CHECKING:
    from kvsearch.calibration.base import Calibration
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.calibration.prompts import CalibrationPrompt
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile
    from kvsearch.plan.origin import ContextSet
    from kvsearch.plan.profile import TableCheck

DEFAULT_METHOD = "lukv"
CALIBRATION_FILES = (CONTEXTS, STEPS_FOLDER, "*.safetensors")  # the last: the profile, and weights of policies
OF_TASKS = {"split", "samples", *TASK_DETAILS} - {"data"}  # what only --tasks reads


class CalibrateOptions(ModelOptions, WorkerOptions, RunDirOptions, TaskOptions, CalibrationOptions):
    """Options of all calibrations: output, texts and tasks; methods add their own."""

    model: str = option(..., MODEL)
    data: str | None = option(
        None,
        "Calibration file; of probe and query_bank also FILE.txt,... or a folder of these, a context each; with "
        "--tasks longbench or gsm8k their file, folder or dataset id, as for evaluate.",
        QUESTIONS,
        shown="the shipped one for this model",
    )
    tasks: Specs | None = option(
        None,
        "Calibrate on the questions of tasks, and their right answers, in place of a file: KIND or KIND:NAME,NAME, "
        "several joined by +, as for evaluate.",
        QUESTIONS,
        metavar="SPEC",
        completes="kvsearch.tasks.catalog:list_specs",
    )
    split: str = option(
        "train", "--tasks: part of the examples, train or select, never what is reported on.", panel=TASKS
    )
    samples: Samples = option(10, "--tasks: contexts per task.", panel=TASKS)
    questions: int | None = option(None, "Use only so many questions, and their contexts.", QUESTIONS, ge=1)

    @classmethod
    def list_options(cls) -> dict[str, tuple[FieldInfo, Option]]:
        """List the options of all methods, or of the chosen one."""
        offered = super().list_options()
        for options in cls.list_variants().values():
            offered = {**options.list_options(), **offered}
        return offered

    @classmethod
    def list_variants(cls) -> Mapping[str, type[JobOptions]]:
        return OPTIONS if cls is CalibrateOptions else {}

    @classmethod
    def choose_model(cls, stated: Mapping[str, Any], given: Mapping[str, Any], path: Path | None) -> type[Self]:
        """Return the model of the method that was given or that the recipe at `path` has stated.

        Raises:
            UsageError: they differ, there is no such method, or something is given that the method does not have.
        """
        known = CALIBRATION_METHODS.list_names()
        typed = given.get("method")
        name = stated.get("method", typed or DEFAULT_METHOD)
        if typed is not None and typed not in known:
            raise UsageError(describe_unknown("method", typed, known))
        if not isinstance(name, str) or name not in known:
            problem = f"method: {name!r} is unknown{suggest(str(name), known)}"
            raise UsageError(list_problems([problem], str(path)))
        if typed not in (None, name):
            raise UsageError(f"{path} is a recipe of method {name}, not {typed}: leave --method or --recipe out")
        options: Any = cls
        if cls.list_variants():
            options = OPTIONS.get(name) or make_calibrate_options(name)
        options.check_given(given)
        return cast("type[Self]", options)

    def to_recipe(self) -> dict[str, Any]:
        """Return what is recorded; without tasks there are no options of theirs."""
        unread = set() if self.tasks is not None else OF_TASKS
        return {key: value for key, value in super().to_recipe().items() if key not in unread}

    def used(self) -> ContextSet | None:
        """Return contexts in whose place others are drawn from tasks."""
        return None

    def configuration(self, texts: CalibrationData) -> RunConfig:
        """Return the configuration of the run, on `texts`."""
        content: dict[str, Any] = {
            "model": self.model, "data": texts.name, "data_sha256": texts.sha256, "questions": texts.questions,
            "recipe": self.resolved(), "seed": self.seed, "dtype": self.dtype, "revision": self.revision,
        }  # fmt: skip
        return RunConfig(job="calibrate", options=self.to_recipe(), content=content)


def make_calibrate_options(method: str) -> type[CalibrateOptions]:
    """Add the options of a calibration method to the job's; errors: see `PluginRegistry.find`."""
    bases = (create_method(method).options, CalibrateOptions)
    made: type[Any] = create_model(f"Calibrate{method.title().replace('_', '')}", __base__=bases)
    return made


def list_calibrate_options() -> dict[str, type[CalibrateOptions]]:
    """Make the options of the job for every method; a method of a package that is broken is left out."""
    options = {}
    for name in CALIBRATION_METHODS.list_names():
        with suppress(EnvironmentFault):  # says so where it is asked for
            options[name] = make_calibrate_options(name)
    return options


OPTIONS = list_calibrate_options()


def dry_run(options: CalibrateOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast a calibration: its configuration, and its cost on this machine.

    All checks before the measurement are run; errors as `calibrate`.
    """
    return forecast_calibrations([options], reporter, models)


def forecast_calibrations(several: Sequence[CalibrateOptions], reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast `calibrate_together`, as `dry_run` does for one calibration."""
    configs, calibrations = _prepare(several, reporter, models)
    content = configs[0].content
    if not calibrations:
        reporter.say(FINISHED_NOTE)
        return Forecast(content)
    prompts = _prompts(calibrations)
    first: Calibration[Any] = calibrations[0]
    work = first.estimate_together(calibrations, prompts)
    if getattr(first.options, "check", False):
        from kvsearch.evaluation.table_check import estimate_check

        work += estimate_check(first.loaded, prompts, first.options)
    cost = StageCost(f"calibrate by {_methods(several)}", len(first.data.contexts), first.data.questions, work)
    return Forecast(content, [cost], first.loaded.model)


@job(CalibrateOptions)
def calibrate(options: CalibrateOptions, reporter: Reporter, models: ModelLoader) -> Profile:
    """Measure which cache entries a model can live without, and write a profile into `output`.

    lukv: from what entries are worth to later answers. lava, cake, adakv: what these rules decide prompt by
    prompt, averaged to static budgets. polykv: what every layer loses under each of several patterns. probe,
    query_bank: a ranking. A calibration that was interrupted goes on when the call is repeated; of a finished one the
    profile is read. query_statistics: mean and covariance of queries, which `export_to` hands
    to other tools.

    Raises:
        UsageError: options that do not go together, unreadable texts, or results of something else in `output`.
        IncompatibleError: the model computes NaN, or a prompt does not fit it.
        EnvironmentFault: the disk is full, or the model cannot be loaded here.
    """
    (profile,) = calibrate_together([options], reporter, models)
    return profile


def calibrate_together(several: Sequence[CalibrateOptions], reporter: Reporter, models: ModelLoader) -> list[Profile]:
    """Write the profile of each of several rankings, which are fitted in one pass over the same contexts.

    Each has a directory; steps are kept in the last one until all are finished. One calibration may be of any method.
    It raises what `calibrate` does.
    """
    configs, calibrations = _prepare(several, reporter, models)
    if not calibrations:
        for options in several:
            require_unchanged(options.output, PROFILE, "restore it, or start anew with --force")
        reporter.say(FINISHED_NOTE)
        return [load_profile(options.output / PROFILE) for options in several]
    from kvsearch.evaluation.runner import describe_environment

    first: Calibration[Any] = calibrations[0]
    loaded = first.loaded
    data = first.data
    options = several[0]
    names = ", ".join(policy.name for policy in first.policies)
    among = "beside" if create_method(options.method).fits_policy else "for"  # a ranking is compared with others
    count = f"{len(data.contexts)} contexts with {data.questions} questions"
    methods = _methods(several)
    reporter.say(f"calibrating {options.model} by {methods} {among} {names} on {count} from {data.name}")
    prompts = _prompts(calibrations)
    directory = several[-1].output
    content = configs[0].content if len(configs) == 1 else {"together": [config.content for config in configs]}
    first.steps = StepCache(directory, hash_step_inputs(loaded, data, prompts, content))

    def words_to_go_on() -> str:
        count = count_steps(directory)
        if not count:
            return "nothing is finished: the same command begins anew"
        how = "the same command, without --force," if options.force else "the same command"
        return f"{count} finished steps are kept in {directory}: {how} goes on with the others"

    with ExitStack() as stack:
        runs = []
        for each, config in zip(several, configs, strict=True):
            config = config.model_copy(update={"execution": describe_environment(loaded)})
            runs.append(stack.enter_context(Run.open(each.output, config, force=each.force, files=CALIBRATION_FILES)))
        stack.enter_context(on_interruption(reporter, words_to_go_on))
        progress = stack.enter_context(reporter.progress(f"calibrating: {options.unit}"))
        profiles = first.measure_together(calibrations, prompts, progress)
        profiles = [_check_table(*pair, reporter) for pair in zip(calibrations, profiles, strict=True)]
        for run, profile in zip(runs, profiles, strict=True):
            save_profile(profile, run.directory / PROFILE, overwrite=True)
            write_contexts(run.directory, {"fitted": data.hashes})
            if run is runs[-1]:
                shutil.rmtree(directory / STEPS_FOLDER, ignore_errors=True)
            run.finish()
    return profiles


def _methods(several: Sequence[CalibrateOptions]) -> str:
    return " and ".join(options.method for options in several)


def _prompts(calibrations: Sequence[Any]) -> list[CalibrationPrompt]:
    """Return the prompts of the calibration that reads most of the contexts; all are prepared."""
    return max([calibration.prepare() for calibration in calibrations], key=len)


def _prepare(
    several: Sequence[CalibrateOptions], reporter: Reporter, models: ModelLoader
) -> tuple[list[RunConfig], list[Any]]:
    """Return the configurations of the runs, and their calibrations once the policies are known to suit the model.

    They are on the same data. There are no calibrations where all are finished.

    Raises:
        UsageError: another calibration is in a directory, or something else.
    """
    policies = [options.policies() for options in several]
    for options in several:
        for remark in options.remarks():
            reporter.warn(remark)
    # before a model is loaded
    earlier = {options.output: read_run(options.output, "calibrate") for options in several}
    data, loaded = _data(several[0], reporter, models)
    configs = [options.configuration(data) for options in several]
    is_finished = True
    for options, config in zip(several, configs, strict=True):
        known = None if options.force else earlier[options.output]
        if known is not None:
            require_equal(options.output, known, config)
        is_finished = is_finished and known is not None and CONFIG in read_sums(options.output)
    if is_finished:
        return configs, []
    from kvsearch.runtime.program import warn_unfit

    loaded = loaded or models.load(several[0].model)
    calibrations = []
    for options, measured in zip(several, policies, strict=True):
        for policy in measured:
            policy.check_model(loaded.fingerprint)
        warn_unfit(loaded.model, measured)
        calibrations.append(create_method(options.method).create_calibration(loaded, data, measured, options))
    return configs, calibrations


def _check_table(calibration: Calibration[Any], profile: Profile, reporter: Reporter) -> Profile:
    """Check the table of a profile against uniform budgets; return the profile with the checks."""
    from kvsearch.evaluation.table_check import check_table, shrink_table

    settings = calibration.options
    if not getattr(settings, "check", False):
        return profile
    checks: tuple[TableCheck, ...] = ()
    if HELD_OUT in profile.arrays:
        with reporter.progress("checking budgets: context") as progress:
            checks = check_table(calibration.loaded, calibration.data, settings, profile, progress)
    if not checks:
        reporter.say(
            f"the table was not checked against even budgets: that takes {MIN_CONTEXTS_TO_JUDGE} different contexts "
            "with answers, and a table by ratios"
        )
        return profile
    for check in checks:
        if check.verdict == "harmful":
            reporter.warn(f"the table loses to even budgets: {check.words}; export refuses it without --allow-harmful")
        else:
            reporter.say(f"{check.verdict}: {check.words}")
    profile = shrink_table(profile, checks)
    return replace(profile, metadata=profile.metadata.model_copy(update={"checks": checks}))


def remarks(options: CalibrateOptions, profile: Profile) -> Iterator[str]:
    """Yield a summary of the profile, its path, and commands for the next step."""
    yield from create_method(options.method).remarks(profile)
    yield f"wrote {options.output / PROFILE}"
    for words in suggest_commands(options, profile):
        yield format_command(*words)


def suggest_commands(options: CalibrateOptions, profile: Profile) -> Iterator[list[str]]:
    """Yield the words of commands that use the profile."""
    run = CalibratedRun(
        options,
        options.model,
        options.output,
        flags=tuple(changed_flags(options)),
        data_flags=tuple(list_changed_flags(options, ("data",))),
        on_tasks=options.tasks is not None,
    )
    yield from create_method(options.method).next_commands(profile, run)


def _data(
    options: CalibrateOptions, reporter: Reporter, models: ModelLoader
) -> tuple[CalibrationData, LoadedModel | None]:
    """Load the texts of a file, or of tasks with the model whose tokenizer they need."""
    if options.tasks is None:
        for name in sorted(OF_TASKS & options.model_fields_set):
            raise UsageError(f"--{name.replace('_', '-')} is for --tasks: leave it out, or name tasks")
        data = load_calibration_data(options.data or find_default_data(options.model), options.bare)
        return data.limit_questions(options.questions), None
    tasks = options.find_tasks(options.model, options.split)
    from kvsearch.calibration.prompts import make_task_data
    from kvsearch.selection.splits import refuse_reported

    refuse_reported(tasks)
    if any(facts.split == "all" for facts in describe_tasks(options.tasks)):
        reporter.say(f"evaluate asks all examples of {options.tasks} by default: add --split report for held-out ones")
    loaded = models.load(options.model)
    data = make_task_data(loaded, tasks, options.samples, options.seed, options.max_length, options.used())
    return data.limit_questions(options.questions), loaded
