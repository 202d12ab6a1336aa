"""Plans and profiles: the files kvsearch writes. Whatever needs numpy is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvsearch.core.canonical import canonical_json, sha256_of
from kvsearch.plan.origin import Provenance
from kvsearch.plan.saved import load_plan, save_plan
from kvsearch.plan.schema import (
    PHASES,
    AllocationSpec,
    LayerPlan,
    ModelFingerprint,
    Phase,
    PhaseNames,
    PhasePlan,
    Plan,
    PolicySpec,
    phases_of,
)
from kvsearch.plan.size import Size, round_half_up

if TYPE_CHECKING:
    from kvsearch.plan.arithmetic import BudgetChange, PlanDiff, SettingChange, budgets_at, convert, diff, merge, scale
    from kvsearch.plan.profile import Profile, ProfileMetadata, load_profile, save_profile
    from kvsearch.plan.profile_arrays import GRID

__all__ = [
    "GRID",
    "PHASES",
    "AllocationSpec",
    "BudgetChange",
    "LayerPlan",
    "ModelFingerprint",
    "Phase",
    "PhaseNames",
    "PhasePlan",
    "Plan",
    "PlanDiff",
    "PolicySpec",
    "Profile",
    "ProfileMetadata",
    "Provenance",
    "SettingChange",
    "Size",
    "budgets_at",
    "canonical_json",
    "convert",
    "diff",
    "load_plan",
    "load_profile",
    "merge",
    "phases_of",
    "round_half_up",
    "save_plan",
    "save_profile",
    "scale",
    "sha256_of",
]

_LAZY = {
    **dict.fromkeys(("budgets_at", "convert", "merge", "scale"), "arithmetic"),
    **dict.fromkeys(("BudgetChange", "PlanDiff", "SettingChange", "diff"), "arithmetic"),
    **dict.fromkeys(("GRID", "Profile", "ProfileMetadata", "load_profile", "save_profile"), "profile"),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
