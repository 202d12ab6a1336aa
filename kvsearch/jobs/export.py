"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.calibration.directory import profile_file
from kvsearch.config.options import Option, Repeated
from kvsearch.errors import UsageError
from kvsearch.jobs.groups import BUDGET, Names
from kvsearch.jobs.plan_files import PlanOptions, Sized
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk
from kvsearch.jobs.targets import PLAN, Targeted, upload, write_files

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exported
    from kvsearch.plan import Plan, Profile, Size
    from kvsearch.strategies.from_signals import Strategy

PANEL = "PolyKV"


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 is


class ExportOptions(PlanOptions, Sized, Targeted):
    """The profile, the size of the plan, how PolyKV's signals become one, and who it is for."""

    job: ClassVar[str] = "export"

    profile: Annotated[Path, Option("Directory or file that `calibrate` wrote; with --to also a plan.", argument=True)]
    join: Annotated[
        tuple[Path, ...],
        Repeated,
        Option(
            "Another lukv profile, of another policy on the same texts: every layer takes the policy that keeps most; "
            "repeatable.",
            metavar="DIR",
            repeated=True,
        ),
    ] = ()
    ratio: Annotated[float | None, Option("Share of the cache to evict, 0 to 1.")] = None
    budget: Annotated[int | None, Field(ge=1), replace(BUDGET, shown="polykv: that of the calibration")] = None
    length: Annotated[int | None, Field(ge=1), Option("Prompt length the integer budgets are for.")] = None
    route: Annotated[
        str | None,
        Option(
            "What every layer chooses its pattern by: cosine, error, ppl or nll; none: --policy everywhere.",
            panel=PANEL,
            shown="as calibrated, or the first that was measured",
        ),
    ] = None
    budget_signal: Annotated[
        str | None,
        Option(
            "What shares the budget out between layers: uniform, entropy, ppl, error, cosine, nll or one of these "
            "with -chosen or -mean.",
            panel=PANEL,
            shown="as calibrated, or uniform",
        ),
    ] = None
    phases: Annotated[
        str | None,
        Option("When to evict: prefill, decode or both.", panel=PANEL, shown="as calibrated, or prefill"),
    ] = None
    inverse_route: Annotated[bool, Option("A control: the worst pattern.", panel=PANEL)] = False
    inverse_budgets: Annotated[bool, Option("A control: least for the most sensitive.", panel=PANEL)] = False
    policy: Annotated[
        str | None,
        Option(
            "With --route none: the pattern of all layers; of a lukv profile with --rivals: only this one.",
            panel=PANEL,
            shown="as calibrated",
        ),
    ] = None
    exclude: Annotated[
        Names | None,
        Option("Patterns that no layer may take.", metavar="NAME,...", panel=PANEL),
    ] = None
    least: Annotated[
        int | None,
        Field(ge=0),
        Option("Entries per kv head that every layer gets.", panel=PANEL, shown="a tenth of the mean"),
    ] = None
    full_layers: Annotated[
        int | None,
        Field(ge=0),
        Option("So many layers keep the whole cache, at its full cost.", panel=PANEL, shown="none"),
    ] = None
    allow_harmful: Annotated[
        bool, Option("Use signals that `validate` judged harmful, or a table that loses to even budgets.")
    ] = False

    def for_target(self, talk: Talk) -> Exported:
        """Make the files of the target, of a profile, of a plan, or of the plan that a profile gives; no file yet.

        Raises:
            UsageError: there is no such target, it needs a profile, or as `make`.
            IncompatibleError: the target cannot express all of it, and `lossy` is off.
        """
        from kvsearch.exporters import exporter_of
        from kvsearch.exporters.base import PlanExporter, ProfileExporter
        from kvsearch.plan import load_plan, load_profile
        from kvsearch.plan.saved import plan_of_folder

        exporter, path = exporter_of(self.to), self.profile
        if self.push_to_hub is not None and (self.to != "folder" or self.offline):
            raise UsageError("--push-to-hub is for --to folder, and not with --offline")
        of_plan = plan_of_folder(path) is not None if path.is_dir() else path.suffix != ".safetensors"
        if isinstance(exporter, ProfileExporter):
            if not path.exists():
                raise UsageError(f"there is no file or directory {path}: check the path")
            if of_plan:
                raise UsageError(f"target {self.to} is made of a profile: give the directory of one")
            profile = load_profile(profile_file(path))
            found = exporter.export(profile, self.inputs(profile.metadata.model, self.length, talk))
        else:
            assert isinstance(exporter, PlanExporter)
            plan = load_plan(path) if of_plan else self.make(talk)
            inputs = self.inputs(plan.model, self.length, talk)
            found = exporter.export(plan, replace(inputs, scores=self.scores_of(plan, path)))
        self.refuse_loss(found)
        return found

    def make(self, talk: Talk) -> Plan:
        """Look the plan up in the profile, or follow its signals; warns of signals that were judged harmful."""
        from kvsearch.plan import load_profile
        from kvsearch.strategies.from_profile import plan_from_profile

        if self.to == PLAN:
            self.check_output()
        profile = load_profile(profile_file(self.profile))
        if profile.metadata.signals is not None and not self.join:
            return self._of_signals(profile, talk)
        several = bool(self.join) or profile.metadata.policies is not None
        of_polykv = (
            (name, option)
            for name, (_, option) in self.offered().items()
            if option.panel == PANEL and not (several and name == "policy")
        )
        unused = [option.called(name) for name, option in of_polykv if _is_given(getattr(self, name))]
        if unused:
            raise UsageError(
                f"{', '.join(unused)}: only for profiles of method polykv, this one is of method "
                f"{profile.metadata.method}"
            )
        if several:
            return self._joint(profile, talk)
        from kvsearch.choose.table_check import harmful_table

        plan, pool = plan_from_profile(profile, self.size), self.size.pool(profile.metadata)
        self._refuse_harmful(harmful_table(profile, 1 - pool.mean / pool.length), talk)
        return plan

    def _refuse_harmful(self, warning: str | None, talk: Talk) -> None:
        """Raise the UsageError of what was judged harmful, if it is not allowed."""
        if warning is not None and not self.allow_harmful:
            raise UsageError(f"{warning}; --allow-harmful to write it all the same")
        if warning is not None:
            talk.warn(warning)

    def _joint(self, profile: Profile, talk: Talk) -> Plan:
        """Choose a policy for every layer, and budgets."""
        from kvsearch.plan import load_profile
        from kvsearch.strategies.joint import joint_plan, policy_curves

        curves = policy_curves([profile, *(load_profile(profile_file(path)) for path in self.join)])
        if self.policy is not None:
            curves = curves.only([self.policy])
        elif seen := curves.fitted_here:
            talk.warn(f"{', '.join(seen)}: fitted on contexts that the budgets are measured on, so it looks better "
                      "than it is: calibrate lukv on others, see --data and --tasks")  # fmt: skip
        found = joint_plan(curves, self.size)
        talk.say(found.words)
        return found.plan

    def _of_signals(self, profile: Profile, talk: Talk) -> Plan:
        from kvsearch.budgets.plan_checks import check_plan
        from kvsearch.choose import verdicts
        from kvsearch.strategies.from_signals import strategy_plan

        size = self.size_in(profile)
        strategy = self.strategy(profile)
        plan = strategy_plan(profile, strategy, size)
        check_plan(plan, "the plan of this strategy")
        directory = self.profile if self.profile.is_dir() else self.profile.parent
        warning = None
        if (directory / verdicts.FILE).exists():
            warning = verdicts.harmful(directory, strategy, size.pool(profile.metadata).mean)
        self._refuse_harmful(warning, talk)
        return plan

    def size_in(self, profile: Profile) -> Size:
        """Return the size that was asked for, or the budget that was measured, where it is one."""
        measured = profile.metadata.signals.budgets if profile.metadata.signals else ()
        if self.budget is not None or self.ratio is not None:
            return self.size
        if len(measured) == 1:
            return self.model_copy(update={"budget": measured[0]}).size
        raise UsageError(
            f"give --budget or --ratio: the profile was measured at {', '.join(map(str, measured))} entries per kv head"
        )

    def strategy(self, profile: Profile) -> Strategy:
        """Return what was asked for, or else what the calibration was told, or else the defaults of a strategy."""
        from kvsearch.signals.table import SignalTable
        from kvsearch.strategies.from_signals import UNIFORM, Strategy

        table = SignalTable(profile)
        route = next(iter(table.routes), "none")  # cosine, the paper's, where it was measured
        asked: dict[str, Any] = {"route": route, "budget_signal": UNIFORM, "phases": "prefill"}
        for source in (table.recorded, dict(self)):
            asked |= {name: value for name in asked if isinstance(value := source.get(name), str)}
        if self.least is not None and asked["budget_signal"] == UNIFORM:
            raise UsageError("--least is for budgets by a signal: name a --budget-signal")
        try:
            return Strategy(
                route=None if asked["route"] == "none" else asked["route"],
                budgets=asked["budget_signal"],
                phases=asked["phases"],
                inverse_route=self.inverse_route,
                inverse_budgets=self.inverse_budgets,
                policy=self.policy,
                exclude=self.exclude or (),
                least=self.least,
                full_layers=self.full_layers or 0,
            )
        except UsageError as error:
            if any(_is_given(getattr(self, name)) for name in asked):
                raise
            raise UsageError(f"{self.profile}: what the calibration was told cannot be followed: {error}") from error


@job(ExportOptions)
def export(options: ExportOptions, talk: Talk) -> Plan:
    """Write a plan that evicts a share of any prompt (`ratio`) or keeps so many entries (`budget`).

    Of several policies that were measured alike (`rivals` of the calibration, or `join`): every layer takes the policy
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
    return options.write(talk)


@job(ExportOptions)
def export_to(options: ExportOptions, talk: Talk) -> Exported:
    """Write a plan, or what a profile knows, in the files of another tool (`to`), and return what that loses.

    Raises:
        UsageError: as `export`, or there is no such target.
        IncompatibleError: the target cannot express all of it, and `lossy` is off.
        EnvironmentFault: a file cannot be written, or the hub does not take the folder.
    """
    found = options.for_target(talk)
    for line in found.describe():
        talk.warn(f"lost: {line}")
    write_files(found, options.output, options.force)
    if options.push_to_hub is not None:
        talk.say(f"uploaded to {upload(options.output, options.push_to_hub)}")
    return found
