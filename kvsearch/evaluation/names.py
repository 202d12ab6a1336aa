"""Names of methods, for reports and completion; imports nothing that runs a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsearch.policies.registry import list_fitted, list_policy_names

FULL = "full"  # the full cache
RANDOM = "random"  # a control
EVOLVED = "evolved"
EXPANDED = "expanded"  # the plan of the smallest budget, scaled
# start plans that are made of no other
UNIFORM = "uniform"
PYRAMID = "pyramid"
STREAMING = "streaming"


class Recipe(NamedTuple):
    """The policy, allocator and allocation of a named method."""

    policy: str
    allocator: str = "uniform"  # or "pyramid"
    allocation: str = "static"
    options: Mapping[str, str | float] = {}  # of the allocation


METHODS: dict[str, Recipe] = {
    "uniform": Recipe("snapkv"),
    "pyramid": Recipe("pyramidkv", "pyramid"),
    "adakv": Recipe("snapkv", allocation="adakv"),
    "ada-pyramid": Recipe("pyramidkv", "pyramid", "adakv"),
    "cake": Recipe("cake", allocation="cake"),
    "lava": Recipe("lava", allocation="lava"),
    "lava-uniform": Recipe("lava", allocation="lava", options={"layers": "planned"}),
    "lava-pyramid": Recipe("lava", "pyramid", "lava", {"layers": "planned"}),
    "lava-equal-heads": Recipe("lava", allocation="lava", options={"heads": "equal"}),
    "defensivekv": Recipe("defensivekv", allocation="adakv", options={"floor_share": 0.0}),
    "layer-defensivekv": Recipe("defensivekv", allocation="lava", options={"layers": "scores", "floor_share": 0.0}),
    "pooled": Recipe("kvzip", allocation="lava", options={"layers": "scores", "floor_share": 0.0}),
}


def list_method_names() -> list[str]:
    """List all names of `parse_methods`; profiles are given as NAME=DIR, a fitted policy as POLICY=DIR."""
    others = {FULL, *METHODS, *list_fitted()}
    policies = [name for name in list_policy_names() if name not in others]
    return [*METHODS, *policies, RANDOM]
