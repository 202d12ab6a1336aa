"""The interface of calibration methods: from options to a calibration, and from its profile to plans and reports.

    class MyMethod(CalibrationMethod):
        name = "mine"
        summary = "what it measures, in a line"
        options = MyOptions          # a CalibrationOptions with `method: Literal["mine"] = "mine"`
        calibration = MyCalibration  # a Calibration[MyOptions]: `prepare` and `measure`
        arrays = TABLE               # of its profiles

It is registered in `kvsearch.plan.methods`, or by a package of your own under the entry point group
`kvsearch.calibration_methods`; `kvsearch.testing.CalibrationContract` says whether it keeps its promises. Modules of
this package do not import torch when they are imported: every command reads the options of all methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvsearch.calibration.options import CalibrationOptions
from kvsearch.plan import Plan, Profile, Size
from kvsearch.plan.profile_arrays import EVICTED_RATIO, ArraySpec

if TYPE_CHECKING:
    from kvsearch.calibration.base import Calibration
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.models.loading import LoadedModel
    from kvsearch.policies import Policy
    from kvsearch.report.figures import ReportPart

SUGGESTED_RATIOS: Final = 0.8, 0.5, 0.2  # shares of the prompt to evict in a first plan: the first that fits is taken


@dataclass(frozen=True)
class ProfilePlan:
    """The plan of a profile, and what to know about it.

    `harm` says why the plan is likely to be worse than one without the profile; `export` needs --allow-harmful.
    """

    plan: Plan
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    harm: str | None = None


@dataclass(frozen=True)
class CalibratedRun:
    """A finished `kvsearch calibrate`, whose profile is in `directory`.

    `flags` are the typed flags that other commands take with the same values (of tasks, prompts and loading the model),
    `data_flags` the typed flag of a calibration file. `on_tasks` says whether its contexts are of tasks.
    """

    options: CalibrationOptions
    model: str
    directory: Path
    flags: tuple[str, ...] = ()
    data_flags: tuple[str, ...] = ()
    on_tasks: bool = False

    @property
    def plan(self) -> str:
        """Where the plan of the profile is suggested to be written."""
        return str(self.directory / "plan.json")


class CalibrationMethod:
    """A calibration method, and what can be done with its profiles.

    A profile whose method is not installed is treated as one of this class.

    Attributes:
        name: what `--method` takes, and what `options.method` and profiles state.
        summary: one line, what is measured and what it is for.
        options: its options, a field each, for command line, recipes and Python.
        calibration: the class that measures, or its place, "module:class", if its module imports torch.
        arrays: the arrays of its profiles, by name.
        makes_plans: whether plans are made of its profiles.
        fits_policy: whether its profiles are the weights of the policy of the same name.
        has_signals: whether its profiles have signals by layer and pattern, with `ProfileMetadata.signals`.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    options: ClassVar[type[CalibrationOptions]] = CalibrationOptions
    calibration: ClassVar[str | type[Any]] = ""
    arrays: ClassVar[Mapping[str, ArraySpec]] = {}
    makes_plans: ClassVar[bool] = True
    fits_policy: ClassVar[bool] = False
    has_signals: ClassVar[bool] = False

    def create_calibration(
        self, loaded: LoadedModel, data: CalibrationData, policies: Sequence[Policy], options: CalibrationOptions
    ) -> Calibration[Any]:
        """Create the calibration on a model and texts of `policies`, which `options.policies()` has made.

        `options` may have more fields than the method's own, such as where the profile is written.
        """
        # its own options only: nothing that is measured may depend on where the profile is written
        own = self.options(**{name: getattr(options, name) for name in self.options.model_fields})
        place: Any = self.calibration
        kind: type[Calibration[Any]] = resolve_name(place) if isinstance(place, str) else place
        return kind(loaded, data, policies, own)

    # --- plans --------------------------------------------------------------------------------------------------------

    def default_budgets(self, profile: Profile) -> Sequence[int]:  # noqa: ARG002
        """Return the budgets that were measured, in entries per kv head; if it is one, plans have it by default."""
        return ()

    def plan_settings(self, profile: Profile) -> Sequence[str]:  # noqa: ARG002
        """Return the settings that `to_plan` reads: some of "route", "budget_signal", "phases", "policy", "least"."""
        return ()

    def to_plan(
        self, profile: Profile, size: Size, settings: Mapping[str, Any] | None = None, source: Path | None = None
    ) -> ProfilePlan:
        """Make the plan of a profile at a size, by default from its table of local ratios.

        `settings` are some of `plan_settings`; `source` is the directory of the profile, which may hold verdicts on it.

        Raises:
            UsageError: the profile has no table, the size cannot be had, or the settings do not go together.
        """
        del settings, source
        from kvsearch.evaluation.table_check import describe_harmful_table
        from kvsearch.plan.build import plan_from_profile

        plan = plan_from_profile(profile, size)
        pool = size.pool(profile.metadata)
        return ProfilePlan(plan, harm=describe_harmful_table(profile, 1 - pool.mean / pool.length))

    # --- reports ------------------------------------------------------------------------------------------------------

    def describe(self, profile: Profile, ratio: float) -> Iterator[ReportPart]:
        """Yield what `show` prints of a profile at a global eviction ratio: tables, figures and lines.

        By default its table of local ratios with the checks of that; without a table, its arrays by name.
        UsageError: `ratio` is out of range.
        """
        from kvsearch.report.profile import list_array_parts, list_table_parts

        yield from (list_table_parts(profile, ratio) if EVICTED_RATIO in profile.arrays else list_array_parts(profile))

    def remarks(self, profile: Profile) -> Iterator[str]:  # noqa: ARG002
        """Yield what to know before a profile is used, a line each."""
        yield from ()

    def next_commands(self, profile: Profile, run: CalibratedRun) -> Iterator[list[str]]:
        """Yield the words of commands that use a profile, without "kvsearch"; by default its plan is exported."""
        metadata = profile.metadata
        for ratio in SUGGESTED_RATIOS:
            # measured for several policies, what is always kept may differ between layers
            if metadata.policies is not None or (1 - ratio) * metadata.length >= metadata.floor:
                yield ["export", str(run.directory), "--ratio", str(ratio), "-o", run.plan]
                return
