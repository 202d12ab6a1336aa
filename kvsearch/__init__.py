"""kvsearch: offline calibration and strategy search for KV-cache eviction in language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.calibration.dynamic import calibrate_dynamic
    from kvsearch.calibration.lukv import calibrate_lukv
    from kvsearch.errors import KvsearchError
    from kvsearch.models.loading import load
    from kvsearch.plan import Plan, Profile, Size, load_plan, save_plan
    from kvsearch.plan.profile import load_profile, save_profile
    from kvsearch.runtime import PlanCache, attach
    from kvsearch.strategies.from_profile import plan_from_profile

# resolved on first use, so that `import kvsearch` stays light
_HOMES = {
    "KvsearchError": "kvsearch.errors", "Plan": "kvsearch.plan", "PlanCache": "kvsearch.runtime",
    "Profile": "kvsearch.plan", "Size": "kvsearch.plan", "attach": "kvsearch.runtime",
    "calibrate_dynamic": "kvsearch.calibration.dynamic", "calibrate_lukv": "kvsearch.calibration.lukv",
    "load": "kvsearch.models.loading", "load_plan": "kvsearch.plan",
    "load_profile": "kvsearch.plan.profile", "plan_from_profile": "kvsearch.strategies.from_profile",
    "save_plan": "kvsearch.plan",
    "save_profile": "kvsearch.plan.profile",
}  # fmt: skip

__all__ = [
    "KvsearchError", "Plan", "PlanCache", "Profile", "Size", "attach", "calibrate_dynamic", "calibrate_lukv",
    "load", "load_plan",
    "load_profile", "plan_from_profile", "save_plan", "save_profile",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvsearch' has no attribute {name!r}")
