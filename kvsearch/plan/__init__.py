"""Plans and profiles: the files kvsearch writes. Whatever needs numpy is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvsearch.core.canonical import canonical_json
from kvsearch.plan.saved import load_plan, save_plan
from kvsearch.plan.schema import PHASES, ModelFingerprint, Phase, PhaseNames, PhasePlan, Plan, PolicySpec, parse_phases
from kvsearch.plan.size import Size

if TYPE_CHECKING:
    from kvsearch.plan.profile import Profile, ProfileMetadata, load_profile, save_profile

__all__ = [
    "PHASES",
    "ModelFingerprint",
    "Phase",
    "PhaseNames",
    "PhasePlan",
    "Plan",
    "PolicySpec",
    "Profile",
    "ProfileMetadata",
    "Size",
    "canonical_json",
    "load_plan",
    "load_profile",
    "parse_phases",
    "save_plan",
    "save_profile",
]

_LAZY = ("Profile", "ProfileMetadata", "load_profile", "save_profile")


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.profile"), name)
