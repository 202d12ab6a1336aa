"""Methods that measure a table of local eviction ratios, a budget for every head: LU-KV, and rules made static."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvsearch.calibration.options import AdakvOptions, CakeOptions, LavaOptions, LukvOptions
from kvsearch.methods.base import CalibrationMethod, ProfilePlan
from kvsearch.plan import Profile, Size
from kvsearch.plan.profile_arrays import BESIDE_TABLE, COMPARED_ARRAYS, TABLE, ArraySpec

LUKV_DETAILS = ("question_ratio", "question_context", "recall", "oracle_recall", "mass", "held_out_ratio")
DYNAMIC_DETAILS = ("question_ratio", "question_context", "question_length", "ratio_deviation", "held_out_ratio")


class LukvMethod(CalibrationMethod):
    """LU-KV (arXiv 2602.08585): a table of local ratios; with several policies, the best of them for every layer."""

    name = "lukv"
    summary = "budgets of heads, from what entries are worth to later answers"
    options = LukvOptions
    calibration = "kvsearch.calibration.lukv:LukvCalibration"
    arrays: ClassVar[Mapping[str, ArraySpec]] = {
        **TABLE,
        **{name: BESIDE_TABLE[name] for name in LUKV_DETAILS},
        **{name: spec._replace(needed=False) for name, spec in COMPARED_ARRAYS.items()},
    }

    def plan_settings(self, profile: Profile) -> Sequence[str]:
        return () if profile.metadata.policies is None else ("policy",)

    def to_plan(
        self, profile: Profile, size: Size, settings: Mapping[str, Any] | None = None, source: Path | None = None
    ) -> ProfilePlan:
        """Make the plan of the table, or, of several measured policies, the plan with the best one in every layer."""
        if profile.metadata.policies is None:
            return super().to_plan(profile, size, settings, source)
        from kvsearch.selection.joint import make_joint_plan, read_policy_curves

        curves = read_policy_curves(profile)
        warnings: tuple[str, ...] = ()
        policy = (settings or {}).get("policy")
        if policy is not None:  # nothing is chosen, so no policy has an unfair lead
            curves = curves.select([policy])
        elif names := curves.fitted_here:
            warnings = (
                f"{', '.join(names)}: fitted on contexts that the budgets are measured on, so it looks "
                "better than it is: calibrate lukv on others, see --data and --tasks",
            )
        joint = make_joint_plan(curves, size)
        return ProfilePlan(joint.plan, warnings, (joint.words,))


class DynamicMethod(CalibrationMethod):
    """A rule that decides budgets prompt by prompt, averaged to a table."""

    calibration = "kvsearch.calibration.dynamic:DynamicCalibration"
    arrays: ClassVar[Mapping[str, ArraySpec]] = {**TABLE, **{name: BESIDE_TABLE[name] for name in DYNAMIC_DETAILS}}


class LavaMethod(DynamicMethod):
    """LAVa, see `kvsearch.budgets.lava`."""

    name = "lava"
    summary = "budgets of layers and heads, the mean of what LAVa decides for every prompt"
    options = LavaOptions


class CakeMethod(DynamicMethod):
    """CAKE, see `kvsearch.budgets.cake`."""

    name = "cake"
    summary = "budgets of layers, the mean of what CAKE decides for every prompt"
    options = CakeOptions

    def remarks(self, profile: Profile) -> Iterator[str]:
        from kvsearch.report.profile import describe_exponents

        yield describe_exponents(profile)


class AdakvMethod(DynamicMethod):
    """AdaKV, see `kvsearch.budgets.adakv`."""

    name = "adakv"
    summary = "budgets of the heads of a layer, the mean of what AdaKV decides for every prompt"
    options = AdakvOptions
