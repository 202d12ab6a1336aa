"""Profiles of signals made up for tests: of the shape a PolyKV calibration writes, with known or random values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsearch.plan import ModelFingerprint, Profile, ProfileMetadata
from kvsearch.policies import create_policy
from tests.plan.builders import metadata_dict, model_dict

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 4}, "streaming": {"sinks": 2}, "tova": {}}


def signal_metadata(
    model: ModelFingerprint | None = None,
    patterns: dict[str, dict[str, Any]] | None = None,
    phases: tuple[str, ...] = ("prefill", "decode"),
    budgets: tuple[int, ...] = (32,),
    **changes: Any,
) -> ProfileMetadata:
    """Metadata of a polykv profile; all layers of `model` (default: a toy of 4 layers and 2 kv heads) are measured."""
    described = model_dict(layers=4) if model is None else model.model_dump()
    made = [create_policy(name, params) for name, params in (PATTERNS if patterns is None else patterns).items()]
    specs = [{"name": policy.name, "params": policy.parameters()} for policy in made]
    axes = {"patterns": specs, "phases": phases, "budgets": budgets, "protocol": "question-agnostic"}
    layers = list(range(described["layers"]))
    whole = {
        **metadata_dict(model=described, method="polykv", policy=specs[0], layers=layers, length=200),
        "signals": axes,
        **changes,
    }
    return ProfileMetadata.model_validate(whole)


def make_signals(metadata: ProfileMetadata | None = None, samples: int = 3, seed: int = 0, **arrays: Any) -> Profile:
    """A profile of random signals; `arrays` replace some of them, None leaves one out."""
    metadata = metadata or signal_metadata()
    axes, rng = metadata.signals, np.random.default_rng(seed)
    by_phase = (len(axes.phases), len(metadata.layers))
    whole = (samples, len(axes.budgets), *by_phase, len(axes.patterns))
    full = rng.uniform(1, 2, samples)
    found: dict[str, Any] = {
        "cosine": rng.uniform(0.5, 1, whole).astype(np.float32),
        "relative_error": rng.uniform(0, 0.9, whole).astype(np.float32),
        "nll": full[:, None, None, None, None] + rng.uniform(-0.1, 1, whole),
        "full_nll": full,
        "mean_entropy": np.random.default_rng(seed + 1).uniform(3, 6, by_phase).astype(np.float32),
        "sample_tokens": rng.integers(1, 9, samples).astype(np.int32),
        "sample_length": np.full(samples, metadata.length, dtype=np.int32),
        "sample_context": np.arange(samples, dtype=np.int32),
        **arrays,
    }
    return Profile(metadata, {name: array for name, array in found.items() if array is not None})
