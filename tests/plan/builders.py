"""Small valid plans and profiles to start a test from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsearch.core.canonical import hash_json
from kvsearch.plan import ModelFingerprint, Plan, Profile, ProfileMetadata

PROVENANCE: dict[str, Any] = {
    "method": "uniform",
    "seed": 7,
    "kvsearch": "0.1.0",
    "torch": "2.8.0",
    "transformers": "5.17.0",
    "data_sha256": None,
    "settings": {"questions": 3, "ratios": [0.5, 0.25], "note": "né"},
}


def model_dict(layers: int = 3, kv_heads: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "name": "toy",
        "model_type": "llama",
        "config_sha256": hash_json("config"),
        "weights_sha256": hash_json("weights"),
        "revision": None,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": 8,
        **changes,
    }


def model(**changes: Any) -> ModelFingerprint:
    return ModelFingerprint.model_validate(model_dict(**changes))


FOREIGN_POLICY: dict[str, Any] = {"name": "snapkv", "params": {"window": 4, "pool": "max", "exact": True, "decay": 0.5}}


def phase_dict(
    budgets: Sequence[list[int] | None], policy: dict[str, Any] = FOREIGN_POLICY, **more: Any
) -> dict[str, Any]:
    """Layers of one policy, with what `more` is said of each."""
    return {"layers": [None if budget is None else {"policy": policy, "budget": budget, **more} for budget in budgets]}


def plan_dict(budgets: Sequence[list[int] | None] | None = None, **changes: Any) -> dict[str, Any]:
    """The content of a plan file; `total` follows the budgets unless given. Layer 1 keeps its full cache."""
    budgets = [[10, 6], None, [4, 12]] if budgets is None else budgets
    planned = [budget for budget in budgets if budget is not None]
    return {
        "format": "kvsearch.plan",
        "version": 1,
        "model": model_dict(layers=len(budgets), kv_heads=len(planned[0])),
        "length": 40,
        "scaling": "proportional",
        "floor": 4,
        "prefill": phase_dict(budgets),
        "decode": None,
        "total": sum(map(sum, planned)),
        "provenance": PROVENANCE,
        **changes,
    }


def make_plan(budgets: Sequence[list[int] | None] | None = None, **changes: Any) -> Plan:
    return Plan.model_validate(plan_dict(budgets, **changes))


def metadata_dict(**changes: Any) -> dict[str, Any]:
    return {
        "format": "kvsearch.profile",
        "version": 1,
        "model": model_dict(),
        "method": "lukv",
        "policy": {"name": "snapkv", "params": {}},
        "length": 100,
        "questions": 3,
        "layers": [0, 2],
        "floor": 1,
        "provenance": {**PROVENANCE, "method": "lukv"},
        **changes,
    }


def ratio_table(layers: int = 2, kv_heads: int = 2) -> np.ndarray:
    """[99, layers, kv_heads]: rows spread around their global ratio without changing its mean."""
    grid = np.arange(1, 100) / 100
    spread = np.linspace(-1, 1, layers * kv_heads).reshape(layers, kv_heads)
    room = np.minimum(grid, 1 - grid)[:, None, None]
    return (grid[:, None, None] + room * spread).astype(np.float32)


def make_profile(table: np.ndarray | None = None, **changes: Any) -> Profile:
    metadata = ProfileMetadata.model_validate(metadata_dict(**changes))
    return Profile(metadata, {"evicted_ratio": ratio_table(*metadata.shape) if table is None else table})
