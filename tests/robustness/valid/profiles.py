"""Profiles of every method, and weights of policies."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from safetensors.torch import save as save_tensors

from kvsearch.plan import PolicySpec, Profile, ProfileMetadata
from kvsearch.plan.profile import TableCheck, read_profile
from tests.plan.builders import metadata_dict, model_dict
from tests.policies.probes import SCORES, ranking, zap_weights
from tests.robustness.valid import stored


@lru_cache
def table_profiles() -> list[bytes]:
    """Profiles with a table of local ratios: LU-KV's, with rivals, with checks, and those of dynamic rules."""
    names = ("lukv", "lukv-rivals", "cake", "adakv")
    found = stored(*(f"{name}.safetensors" for name in names))
    checks = (TableCheck(ratio=0.8, contexts=12, table=0.5, even=0.4, low=-0.1, high=0.3, verdict="unproven"),)
    plain = read_profile(found[0], "lukv")
    checked = plain.metadata.model_copy(update={"checks": checks})
    return [*found, Profile(checked, plain.arrays).to_bytes()]


@lru_cache
def signal_profiles() -> list[bytes]:
    """Profiles of signals by pattern, of one phase and of both."""
    found = []
    for phases in (["prefill"], ["prefill", "decode"]):
        axes = {
            "patterns": [{"name": name, "params": {}} for name in ("snapkv", "streaming", "tova")],
            "phases": phases, "budgets": [16, 32], "protocol": "question-agnostic",
        }  # fmt: skip
        told = metadata_dict(method="polykv", signals=axes, length=200)
        told["provenance"] = {**told["provenance"], "method": "polykv", "settings": {"route": "cosine"}}
        rng, samples, layers = np.random.default_rng(0), 4, 2
        whole = (samples, 2, len(phases), layers, 3)
        arrays = {
            "cosine": rng.uniform(0.5, 1, whole), "relative_error": rng.uniform(0, 1, whole),
            "nll": rng.uniform(1, 2, whole), "full_nll": rng.uniform(1, 2, samples),
            "entropy": rng.uniform(0, 1, (samples, len(phases), layers)),
            "mean_entropy": rng.uniform(0, 3, (len(phases), layers)),
            "sample_tokens": np.full(samples, 9, np.int32), "sample_length": np.array([150, 200, 180, 190], np.int32),
            "sample_context": np.array([0, 0, 1, 1], np.int32),
        }  # fmt: skip
        found.append(Profile(ProfileMetadata.model_validate(told), arrays).to_bytes())
    return found


def _queries() -> dict[str, Any]:
    told = metadata_dict(method="query_statistics", layers=[0, 1, 2])
    return {**told, "provenance": {**told["provenance"], "settings": {"queries": 1200, "data": "tiny"}}}


@lru_cache
def query_profiles() -> list[bytes]:
    """Profiles of statistics of queries."""
    rng = np.random.default_rng(0)
    metadata = ProfileMetadata.model_validate(_queries())
    metadata = metadata.model_copy(update={"policy": PolicySpec(name="expected_attention")})
    arrays = {
        "query_mean": rng.normal(size=(3, 4, 8)).astype(np.float32),
        "query_cov": np.broadcast_to(np.eye(8, dtype=np.float32), (3, 4, 8, 8)),
        "query_abs": np.ones((3, 4, 4), np.float32),
    }
    return [Profile(metadata, {name: np.ascontiguousarray(one) for name, one in arrays.items()}).to_bytes()]


@lru_cache
def rankings(first: int = 0) -> list[bytes]:
    """Weights of fitted rankings, from the `first` on."""
    found = [ranking().to_bytes(), ranking(("key", "value", "value_norm"), size=17, layers=(0, 1), heads=2).to_bytes()]
    return found[first:]


@lru_cache
def compared_rankings() -> list[bytes]:
    """Profiles of fitted rankings with all that `show` says of them."""
    rng, names, at = np.random.default_rng(3), ("probe", "snapkv", "h2o"), (0.1, 0.2)
    settings = {"rankings": names, "at": at, "targets": ("answers",), "contexts": (3, 1, 2)}
    more = {"unseen_heads": ("0.1", "1.0"), "without_questions": 2}
    found = []
    for told in ({**settings, "features": SCORES}, {**settings, **more, "few_contexts": True}):
        shapes = {"recall": (3, 2, 2, 2), "text_loss": (2, 3, 2)}
        arrays = {name: rng.uniform(0.1, 1, shape) for name, shape in shapes.items()}
        arrays["text_loss"][:, 0] /= 10  # the fit is the best
        made = ranking(layers=(0, 1), heads=2, **arrays)
        origin = made.metadata.provenance.model_copy(update={"settings": {"features": SCORES, **told}})
        metadata = made.metadata.model_copy(update={"provenance": origin})
        found.append(replace(made, metadata=metadata).to_bytes())
    return found


@lru_cache
def query_banks() -> list[bytes]:
    """Weights of banks of queries."""
    rng, found = np.random.default_rng(1), []
    for even in (None, np.zeros((2, 2), np.float32)):
        told = metadata_dict(method="query_bank", layers=[0, 1], model=model_dict(layers=2, kv_heads=2, head_dim=4))
        told["policy"] = {"name": "query_bank", "params": {}}
        arrays = {"queries": rng.normal(size=(2, 2, 1, 3, 4)).astype(np.float32)}
        arrays |= {} if even is None else {"even": even}
        found.append(Profile(ProfileMetadata.model_validate(told), arrays).to_bytes())
    return found


@lru_cache
def zap_files() -> list[bytes]:
    """Weights of KVzap, of two maps a layer and of one."""
    return [save_tensors(zap_weights(2, 2, 6, hidden)) for hidden in (3, None)]


def zap_config() -> list[bytes]:
    """The configuration beside them."""
    return [
        json.dumps({"model_type": "kvzap", "input_dim": 6, "hidden_dim": 3, "output_dim": 2, "n_modules": 2}).encode()
    ]
