"""PolyKV (arXiv 2606.15157): signals of every layer under several patterns, and strategies that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.core.errors import UsageError
from kvsearch.methods.base import CalibratedRun, CalibrationMethod, ProfilePlan
from kvsearch.plan import Profile, Size
from kvsearch.plan.profile_arrays import SIGNAL_ARRAYS

if TYPE_CHECKING:
    from kvsearch.report.figures import ReportPart

ENTROPY_ALONE = ("entropy",)  # signals that can share out budgets only


class PolykvMethod(CalibrationMethod):
    """Signals by layer, phase and pattern: the change of attention outputs and losses, and the entropy of attention."""

    name = "polykv"
    summary = "a pattern for every layer, from what each loses under several of them"
    options = PolykvOptions
    calibration = "kvsearch.calibration.polykv.measure:PolykvCalibration"
    arrays = SIGNAL_ARRAYS
    has_signals = True

    def default_budgets(self, profile: Profile) -> Sequence[int]:
        from kvsearch.signals.table import SignalTable

        return SignalTable(profile).axes.budgets

    def plan_settings(self, profile: Profile) -> Sequence[str]:  # noqa: ARG002
        return ("route", "budget_signal", "phases", "policy", "least")

    def to_plan(
        self, profile: Profile, size: Size, settings: Mapping[str, Any] | None = None, source: Path | None = None
    ) -> ProfilePlan:
        """Make the plan of the strategy in `settings`, by default by the signals that were measured.

        It is harmful if `validate` judged one of its signals so; UsageError if settings conflict.
        """
        from kvsearch.evaluation.names import UNIFORM
        from kvsearch.results.validation import find_harmful
        from kvsearch.selection.from_signals import Strategy, make_strategy_plan
        from kvsearch.signals.table import SignalTable

        table = SignalTable(profile)
        wanted = settings or {}
        route = wanted.get("route") or next(iter(table.routes), "none")  # cosine, the paper's, where it was measured
        budgets = wanted.get("budget_signal")
        if wanted.get("least") is not None and budgets in (None, UNIFORM):
            raise UsageError("--least is for budgets by a signal: name a --budget-signal")
        strategy = Strategy(
            route=None if route == "none" else route,
            budgets=budgets or UNIFORM,
            phases=wanted.get("phases") or table.axes.phases[0],
            policy=wanted.get("policy"),
            least=wanted.get("least"),
        )
        plan = make_strategy_plan(profile, strategy, size)
        harm = None if source is None else find_harmful(source, strategy, size.pool(profile.metadata).mean)
        return ProfilePlan(plan, harm=harm)

    def describe(self, profile: Profile, ratio: float) -> Iterator[ReportPart]:  # noqa: ARG002
        from kvsearch.report.profile import list_signal_parts
        from kvsearch.signals.table import SignalTable

        yield from list_signal_parts(SignalTable(profile))

    def next_commands(self, profile: Profile, run: CalibratedRun) -> Iterator[list[str]]:  # noqa: ARG002
        options = run.options
        assert isinstance(options, PolykvOptions)
        place = str(run.directory)
        size = ["--budget", str(options.budgets[0])]
        yield ["validate", place, *run.flags] if options.signals != ENTROPY_ALONE else ["show", place]
        if options.signals == ENTROPY_ALONE:
            size += ["--budget-signal", "entropy"]
        yield ["export", place, *size, "-o", run.plan]
