"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.calibration.steps import find_profile_file
from kvsearch.commands.groups import BUDGET, ModelOptions
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.plan import PlanOptions, SizeOptions, make_checked_plan, resolve_size, write_plan
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import RULE, JobOptions, option
from kvsearch.core.errors import IncompatibleError, UsageError, require
from kvsearch.core.files import read_text, require_directory, write_atomically
from kvsearch.core.parsing import read_json
from kvsearch.exporters import BUILT_IN_TARGETS, create_exporter
from kvsearch.methods.base import CalibrationMethod
from kvsearch.models.gguf import GGUF_SUFFIX
from kvsearch.models.loading import MODEL_CONFIG_FILE as MODEL_CONFIG
from kvsearch.models.real import REAL_MODELS
from kvsearch.plan import ModelFingerprint, Plan, load_plan, load_profile
from kvsearch.plan.methods import find_writer
from kvsearch.plan.saved import FOLDER_PLAN, PROFILE
from kvsearch.runs.identity import CONFIG
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import finish_run, mark_unfinished

if TYPE_CHECKING:
    from kvsearch.exporters.base import ExportedFiles, ExportInputs
    from kvsearch.models.loading import LoadedModel

TOOLS_PANEL = "Other tools"
POLYKV_PANEL = "PolyKV"
PLAN_TARGET = "plan"  # the target of every other kind of export: one plan file


class ExportOptions(PlanOptions, SizeOptions, ModelOptions):
    """Options of `export`: the profile, the size of the plan, PolyKV's strategy, and the target."""

    profile: Path = option(..., "Directory or file that `calibrate` wrote; with --to also a plan.", argument=True)
    budget: int | None = option(None, BUDGET, shown="polykv: that of the calibration", ge=1)
    route: str | None = option(
        None,
        "The signal that chooses every layer's pattern: cosine, error, ppl or nll; none: --policy everywhere.",
        panel=POLYKV_PANEL,
        shown="the first that was measured",
    )
    budget_signal: str | None = option(
        None,
        "What divides the budget among layers: uniform, entropy, ppl, error, cosine, nll or one of these "
        "with -chosen or -mean.",
        panel=POLYKV_PANEL,
        shown="uniform",
    )
    phases: str | None = option(
        None, "When to evict: prefill, decode or both.", panel=POLYKV_PANEL, shown="prefill, if measured"
    )
    policy: str | None = option(
        None,
        "With --route none: the pattern of all layers; of a lukv profile with --rivals: only this one.",
        panel=POLYKV_PANEL,
        shown="as calibrated",
    )
    least: int | None = option(
        None, "Entries per kv head that every layer gets.", panel=POLYKV_PANEL, shown="a tenth of the mean", ge=0
    )
    allow_harmful: bool = option(
        False, "Use signals that `validate` judged harmful, or a table that loses to even budgets."
    )
    to: str = option(
        PLAN_TARGET,
        "plan: a plan file; model: beside the model in the folder --output; or the files of another tool: "
        f"{', '.join(name for name in BUILT_IN_TARGETS if name != 'model')}.",
        RULE,
        metavar="TARGET",
        panel=TOOLS_PANEL,
        recorded=False,
        completes="kvsearch.exporters:list_targets",
    )
    lossy: bool = option(
        False, "Write it even if the target cannot express all of the plan.", panel=TOOLS_PANEL, recorded=False
    )
    model: str | None = option(
        None,
        "The model, for targets that need its query heads or weights; what --to model saves in a new folder.",
        panel=TOOLS_PANEL,
        shown="of --to model: that of the plan, if it is a GGUF file",
        recorded=False,
    )

    @property
    def folder(self) -> Path:
        """The directory of the profile."""
        return self.profile if self.profile.is_dir() else self.profile.parent

    def evaluation_options(self) -> JobOptions:
        """Return the options of the calibration, if its directory has them."""
        from kvsearch.commands.calibrate import CalibrateOptions

        with suppress(UsageError):
            return CalibrateOptions.of(recipe=self.folder / CONFIG, output=self.folder)
        return self


def prepare_inputs(options: ExportOptions, model: ModelFingerprint, models: ModelLoader) -> ExportInputs:
    """Return the inputs of a target besides a plan or profile of this `model`, which is loaded if needed.

    Raises:
        UsageError: there is no such target, or no folder of a model to put a plan into.
        IncompatibleError: `--model` is another one.
    """
    from kvsearch.exporters.base import CARD_FILE, ExportInputs
    from kvsearch.exporters.folder import make_saved_config
    from kvsearch.models.architecture import describe

    if options.to == "model":
        require_directory(options.output)
        is_new = not (options.output / MODEL_CONFIG).is_file()
        loaded = models.load(find_saved_model(options, model) if is_new else str(options.output))
        model.require(loaded.fingerprint, "what is exported")
        config = make_saved_config(loaded.model) if is_new else read_json(options.output / MODEL_CONFIG)
        card = read_text(options.output / CARD_FILE) if (options.output / CARD_FILE).exists() else None
        return ExportInputs(options.length, config=config, card=card, unsaved=loaded if is_new else None)
    if options.model is None or not create_exporter(options.to).needs_model:
        return ExportInputs(options.length)
    loaded = models.load(options.model)
    model.require(loaded.fingerprint, "what is exported")
    return ExportInputs(options.length, describe(loaded.model), loaded.model)


def find_saved_model(options: ExportOptions, model: ModelFingerprint) -> str:
    """Return the name of the model to save beside the plan: `--model`, or that of the plan if it is a GGUF file.

    Raises:
        UsageError: neither is given.
    """
    of_file = model.name in REAL_MODELS or model.name.lower().endswith(GGUF_SUFFIX)
    return require(
        options.model or (model.name if of_file else None),
        f"{options.output} is no folder of a model ({MODEL_CONFIG} is not there): give that of the model, or a new "
        "one and --model, and the model is saved there, too",
    )


def make_target_files(options: ExportOptions, reporter: Reporter, models: ModelLoader) -> ExportedFiles:
    """Make the files of the target from a profile, a plan, or the plan of a profile, without writing them.

    Raises:
        UsageError: there is no such target, it needs a profile, or as `make_plan`.
        IncompatibleError: the target cannot express all of it, and `lossy` is off.
    """
    from kvsearch.exporters.base import PlanExporter, ProfileExporter

    exporter = create_exporter(options.to)
    path = options.profile
    of_plan = path.suffix != ".safetensors"
    if path.is_dir():  # which may be that of a calibration
        of_plan = (path / FOLDER_PLAN).is_file() and not (path / PROFILE).exists()
    if isinstance(exporter, ProfileExporter):
        if of_plan:
            raise UsageError(f"target {options.to} is made of a profile, and {path} is none: give the directory of one")
        profile = load_profile(find_profile_file(path))
        exported = exporter.export(profile, prepare_inputs(options, profile.metadata.model, models))
    else:
        assert isinstance(exporter, PlanExporter)
        plan = load_plan(path) if of_plan else make_profile_plan(options, reporter)
        inputs = prepare_inputs(options, plan.model, models)
        if options.to in ("folder", "custom-generate", "model"):
            from kvsearch.report.artifacts import run_scores

            inputs = replace(inputs, scores=run_scores(options.folder, plan))
        exported = exporter.export(plan, inputs)
    if exported.losses and not options.lossy:
        raise IncompatibleError(
            f"target {options.to} cannot express all of the plan: {'; '.join(exported.describe())}; give --lossy to "
            "write it anyway"
        )
    return exported


def make_profile_plan(options: ExportOptions, reporter: Reporter) -> Plan:
    """Make the plan of the profile as its method does; refuse or warn of one that is likely to be worse than none."""
    profile = load_profile(find_profile_file(options.profile))
    method: CalibrationMethod = find_writer(profile.metadata.method)
    known = method.plan_settings(profile)
    offered = {name: option for name, (_, option) in options.list_options().items() if option.panel == POLYKV_PANEL}
    settings = {name: value for name in offered if (value := getattr(options, name)) is not None}  # 0 is given
    if unread := [offered[name].format_flag(name) for name in settings if name not in known]:
        raise UsageError(
            f"{', '.join(unread)}: only for profiles of method {POLYKV_PANEL.lower()}, this one is of method "
            f"{profile.metadata.method}"
        )
    size = resolve_size(options.budget, options.ratio, options.length, method.default_budgets(profile))
    made = method.to_plan(profile, size, settings, options.folder)
    for line in made.warnings:
        reporter.warn(line)
    for line in made.notes:
        reporter.say(line)
    if made.harm is not None and not options.allow_harmful:
        raise UsageError(f"{made.harm}; give --allow-harmful to write it anyway")
    if made.harm is not None:
        reporter.warn(made.harm)
    return made.plan


def make_plan(options: ExportOptions, reporter: Reporter, models: ModelLoader) -> Plan:  # noqa: ARG001
    """Make and check the plan of `export` without writing it; errors as `export`."""
    return make_checked_plan(options, lambda: make_profile_plan(options, reporter))


@job(ExportOptions)
def export(options: ExportOptions, reporter: Reporter, models: ModelLoader) -> Plan:
    """Write a plan that evicts a share of any prompt (`ratio`) or keeps so many entries (`budget`).

    Of several policies that were measured alike (`rivals` of the calibration): every layer takes the policy
    that keeps most of the measured importance, with budgets that are solved for together.

    Of a PolyKV profile: every layer takes the pattern that its signals prefer, and the share of the budget that its
    sensitivity asks for.

    Raises:
        UsageError: options that do not go together or do not suit the profile, signals that were judged harmful, or a
            plan that is there already.
        EnvironmentFault: a file cannot be read or written.
    """
    if options.to != PLAN_TARGET:
        raise UsageError(f"export() writes plan files: call export_to() for target {options.to!r}")
    return write_plan(make_plan(options, reporter, models), options)


@job(ExportOptions)
def export_to(options: ExportOptions, reporter: Reporter, models: ModelLoader) -> ExportedFiles:
    """Write a plan or a profile in the files of another tool (`to`), and return its losses.

    Raises:
        UsageError: as `export`, or there is no such target.
        IncompatibleError: the target cannot express all of it, and `lossy` is off.
        EnvironmentFault: a file cannot be written.
    """
    exported = make_target_files(options, reporter, models)
    for line in exported.describe():
        reporter.warn(f"lost: {line}")
    write_files(exported, options.output, options.force)
    return exported


def write_files(exported: ExportedFiles, path: Path, force: bool) -> None:
    """Write the files of a target at `path`, or into the folder at `path`, with their checksums.

    Raises:
        UsageError: something is there already, and `force` is off, or it is a folder in place of a file or vice versa;
            another process is writing to the folder.
        EnvironmentFault: they cannot be written.
    """
    from kvsearch.exporters.base import SINGLE_FILE

    if SINGLE_FILE in exported.files:
        write_atomically(path, exported.files[SINGLE_FILE], overwrite=force)
        return
    with lock_directory(path), _saved(exported.model, path) as saved:
        sealed = tuple(name for name in exported.files if name not in exported.updated)
        new = {file.name: file for file in saved if file.name not in exported.files}
        taken = [name for name in (*sealed, *new) if (path / name).exists()]
        if taken and not force:
            raise UsageError(f"{path / taken[0]} exists: choose another folder, or --force to replace it")
        mark_unfinished(path, sealed)
        for name, file in new.items():
            file.replace(path / name)
        for name, data in exported.files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path / name, data)
        finish_run(path, sealed)


def _saved(model: LoadedModel | None, folder: Path) -> AbstractContextManager[list[Path]]:
    """Return the files of a model, to be moved into `folder`; none where there is no model. Errors as `save_files`."""
    if model is None:
        return nullcontext([])
    from kvsearch.exporters.folder import save_files

    return save_files(model, folder)
