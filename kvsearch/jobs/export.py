"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.calibration.steps import profile_file
from kvsearch.config.options import RULE, JobOptions, option
from kvsearch.core.errors import IncompatibleError, UsageError, require
from kvsearch.core.files import read_text, require_directory, write_atomically
from kvsearch.core.parsing import read_json
from kvsearch.exporters import exporter_of
from kvsearch.jobs.groups import BUDGET, Loading
from kvsearch.jobs.plan import PlanOptions, Sized, size_or_measured
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.models.gguf import GGUF_SUFFIX
from kvsearch.models.loading import MODEL_CONFIG_FILE as MODEL_CONFIG
from kvsearch.models.real import REAL_MODELS
from kvsearch.plan import ModelFingerprint, Plan, Profile, load_plan, load_profile
from kvsearch.plan.saved import FOLDER_PLAN, PROFILE
from kvsearch.results.validation import find_harmful
from kvsearch.runs.identity import CONFIG
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import finish_run, mark_unfinished
from kvsearch.signals.table import SignalTable
from kvsearch.strategies.build import plan_from_profile
from kvsearch.strategies.from_signals import Strategy, strategy_plan
from kvsearch.strategies.joint import joint_plan, policy_curves
from kvsearch.strategies.names import UNIFORM

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exported, Inputs
    from kvsearch.models.loading import LoadedModel

TOOLS_PANEL = "Other tools"
PANEL = "PolyKV"
PLAN = "plan"  # the target of every other kind of export: one plan file


class ExportOptions(PlanOptions, Sized, Loading):
    """The profile, the size of the plan, how PolyKV's signals become one, and who it is for."""

    profile: Path = option(..., "Directory or file that `calibrate` wrote; with --to also a plan.", argument=True)
    budget: int | None = option(None, BUDGET, shown="polykv: that of the calibration", ge=1)
    route: str | None = option(
        None,
        "The signal that chooses every layer's pattern: cosine, error, ppl or nll; none: --policy everywhere.",
        panel=PANEL,
        shown="the first that was measured",
    )
    budget_signal: str | None = option(
        None,
        "What divides the budget among layers: uniform, entropy, ppl, error, cosine, nll or one of these "
        "with -chosen or -mean.",
        panel=PANEL,
        shown="uniform",
    )
    phases: str | None = option(
        None, "When to evict: prefill, decode or both.", panel=PANEL, shown="prefill, if measured"
    )
    policy: str | None = option(
        None,
        "With --route none: the pattern of all layers; of a lukv profile with --rivals: only this one.",
        panel=PANEL,
        shown="as calibrated",
    )
    least: int | None = option(
        None, "Entries per kv head that every layer gets.", panel=PANEL, shown="a tenth of the mean", ge=0
    )
    allow_harmful: bool = option(
        False, "Use signals that `validate` judged harmful, or a table that loses to even budgets."
    )
    to: str = option(
        PLAN,
        "plan: a plan file; model: beside the model in the folder --output; or the files of another tool: folder, "
        "custom-generate, kvpress-lukv, kvpress-layers, kvpress-kvzap, kvpress-ea, triattention, duo, headkv, "
        "attention-matching, sparse-vllm, spectralkv, tangram, trtllm-windows, vllm-windows, openvino.",
        RULE,
        metavar="TARGET",
        panel=TOOLS_PANEL,
        recorded=False,
        completes="kvsearch.exporters:TARGETS",
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

    def asked(self) -> JobOptions:
        """Return the options of the calibration, where its directory has them."""
        from kvsearch.jobs.calibrate import CalibrateOptions

        with suppress(UsageError):
            return CalibrateOptions.of(recipe=self.folder / CONFIG, output=self.folder)
        return self

    def inputs(self, model: ModelFingerprint, reporter: Reporter) -> Inputs:
        """Return what the target is told besides a plan or profile of this `model`, which is loaded where it needs it.

        Raises:
            UsageError: there is no such target, or no folder of a model to put a plan into.
            IncompatibleError: `--model` is another one.
        """
        from kvsearch.exporters.base import CARD, Inputs
        from kvsearch.models.architecture import describe
        from kvsearch.models.saving import make_saved_config

        if self.to == "model":
            require_directory(self.output)
            is_new = not (self.output / MODEL_CONFIG).is_file()
            loaded = self.load(self.saved_model(model) if is_new else str(self.output), reporter)
            model.require(loaded.fingerprint, "what is exported")
            config = make_saved_config(loaded.model) if is_new else read_json(self.output / MODEL_CONFIG)
            card = read_text(self.output / CARD) if (self.output / CARD).exists() else None
            return Inputs(self.length, config=config, card=card, unsaved=loaded if is_new else None)
        if self.model is None or not exporter_of(self.to).needs_model:
            return Inputs(self.length)
        loaded = self.load(self.model, reporter)
        model.require(loaded.fingerprint, "what is exported")
        return Inputs(self.length, describe(loaded.model), loaded.model)

    def saved_model(self, model: ModelFingerprint) -> str:
        """Return the name of the model to save beside the plan: `--model`, or that of the plan if it is a GGUF file.

        Raises:
            UsageError: neither is given.
        """
        of_file = model.name in REAL_MODELS or model.name.lower().endswith(GGUF_SUFFIX)
        return require(
            self.model or (model.name if of_file else None),
            f"{self.output} is no folder of a model ({MODEL_CONFIG} is not there): give that of the model, or a new "
            "one and --model, and the model is saved there, too",
        )

    def for_target(self, reporter: Reporter) -> Exported:
        """Make the files of the target, of a profile, of a plan, or of the plan that a profile gives; no file yet.

        Raises:
            UsageError: there is no such target, it needs a profile, or as `compute`.
            IncompatibleError: the target cannot express all of it, and `lossy` is off.
        """
        from kvsearch.exporters.base import PlanExporter, ProfileExporter

        exporter = exporter_of(self.to)
        path = self.profile
        of_plan = path.suffix != ".safetensors"
        if path.is_dir():  # which may be that of a calibration
            of_plan = (path / FOLDER_PLAN).is_file() and not (path / PROFILE).exists()
        if isinstance(exporter, ProfileExporter):
            if of_plan:
                raise UsageError(
                    f"target {self.to} is made of a profile, and {path} is none: give the directory of one"
                )
            profile = load_profile(profile_file(path))
            found = exporter.export(profile, self.inputs(profile.metadata.model, reporter))
        else:
            assert isinstance(exporter, PlanExporter)
            plan = load_plan(path) if of_plan else self.compute(reporter)
            inputs = self.inputs(plan.model, reporter)
            if self.to in ("folder", "custom-generate", "model"):
                from kvsearch.report.artifacts import run_scores

                inputs = replace(inputs, scores=run_scores(self.folder, plan))
            found = exporter.export(plan, inputs)
        if found.losses and not self.lossy:
            raise IncompatibleError(
                f"target {self.to} cannot express all of the plan: {'; '.join(found.describe())}; give --lossy to "
                "write it anyway"
            )
        return found

    def compute(self, reporter: Reporter) -> Plan:
        """Look the plan up in the profile, or follow its signals; warns of signals that were judged harmful."""
        profile = load_profile(profile_file(self.profile))
        if profile.metadata.signals is not None:
            size = size_or_measured(self.budget, self.ratio, self.length, SignalTable(profile).axes.budgets)
            strategy = self.strategy(profile)
            plan = strategy_plan(profile, strategy, size)
            self._refuse_harmful(find_harmful(self.folder, strategy, size.pool(profile.metadata).mean), reporter)
            return plan
        several = profile.metadata.policies is not None
        of_polykv = {
            option.called(name): getattr(self, name)
            for name, (_, option) in self.offered().items()
            if option.panel == PANEL and not (several and name == "policy")
        }
        unused = [flag for flag, value in of_polykv.items() if value is not None and value is not False]  # 0 is given
        if unused:
            raise UsageError(
                f"{', '.join(unused)}: only for profiles of method polykv, this one is of method "
                f"{profile.metadata.method}"
            )
        if several:
            return self._joint(profile, reporter)
        from kvsearch.selection.table_check import harmful_table

        plan = plan_from_profile(profile, self.size)
        pool = self.size.pool(profile.metadata)
        self._refuse_harmful(harmful_table(profile, 1 - pool.mean / pool.length), reporter)
        return plan

    def _refuse_harmful(self, warning: str | None, reporter: Reporter) -> None:
        """Raise the UsageError of what was judged harmful, if it is not allowed."""
        if warning is not None and not self.allow_harmful:
            raise UsageError(f"{warning}; give --allow-harmful to write it anyway")
        if warning is not None:
            reporter.warn(warning)

    def _joint(self, profile: Profile, reporter: Reporter) -> Plan:
        """Choose a policy for every layer, and budgets."""
        curves = policy_curves(profile)
        if self.policy is not None:
            curves = curves.only([self.policy])
        elif seen := curves.fitted_here:
            reporter.warn(f"{', '.join(seen)}: fitted on contexts that the budgets are measured on, so it looks better "
                      "than it is: calibrate lukv on others, see --data and --tasks")  # fmt: skip
        found = joint_plan(curves, self.size)
        reporter.say(found.words)
        return found.plan

    def strategy(self, profile: Profile) -> Strategy:
        """Return what was asked for, or else the defaults of a strategy in what was measured."""
        table = SignalTable(profile)
        route = self.route or next(iter(table.routes), "none")  # cosine, the paper's, where it was measured
        if self.least is not None and self.budget_signal in (None, UNIFORM):
            raise UsageError("--least is for budgets by a signal: name a --budget-signal")
        return Strategy(
            route=None if route == "none" else route,
            budgets=self.budget_signal or UNIFORM,
            phases=self.phases or table.axes.phases[0],
            policy=self.policy,
            least=self.least,
        )


@job(ExportOptions)
def export(options: ExportOptions, reporter: Reporter) -> Plan:
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
    if options.to != PLAN:
        raise UsageError(f"export() writes plan files: call export_to() for target {options.to!r}")
    return options.write(reporter)


@job(ExportOptions)
def export_to(options: ExportOptions, reporter: Reporter) -> Exported:
    """Write a plan, or what a profile knows, in the files of another tool (`to`), and return what that loses.

    Raises:
        UsageError: as `export`, or there is no such target.
        IncompatibleError: the target cannot express all of it, and `lossy` is off.
        EnvironmentFault: a file cannot be written.
    """
    found = options.for_target(reporter)
    for line in found.describe():
        reporter.warn(f"lost: {line}")
    write_files(found, options.output, options.force)
    return found


def write_files(found: Exported, path: Path, force: bool) -> None:
    """Write the files of a target at `path`, or into the folder at `path`, with their checksums.

    Raises:
        UsageError: something is there already, and `force` is off, or it is a folder in place of a file or vice versa;
            another process is writing to the folder.
        EnvironmentFault: they cannot be written.
    """
    from kvsearch.exporters.base import SINGLE

    if SINGLE in found.files:
        write_atomically(path, found.files[SINGLE], overwrite=force)
        return
    with lock_directory(path), _saved(found.model, path) as saved:
        sealed = tuple(name for name in found.files if name not in found.updated)
        new = {file.name: file for file in saved if file.name not in found.files}
        taken = [name for name in (*sealed, *new) if (path / name).exists()]
        if taken and not force:
            raise UsageError(f"{path / taken[0]} exists: choose another folder, or --force to replace it")
        mark_unfinished(path, sealed)
        for name, file in new.items():
            file.replace(path / name)
        for name, data in found.files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path / name, data)
        finish_run(path, sealed)


def _saved(model: LoadedModel | None, folder: Path) -> AbstractContextManager[list[Path]]:
    """Return the files of a model, to be moved into `folder`; none where there is no model. Errors as `save_files`."""
    if model is None:
        return nullcontext([])
    from kvsearch.models.saving import save_files

    return save_files(model, folder)
