"""Fitted policies with random weights of the right shape, and the arithmetic of their scores, for benchmarks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from kvsearch.models.architecture import describe
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.plan import PolicySpec, Profile, ProfileMetadata
from kvsearch.plan.origin import ContextRecord, make_provenance
from kvsearch.plan.saved import WEIGHTS, register_weights
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.probe import FEATURES

WIDTH, BANK, WINDOW = 32, 64, 8  # hidden units of a probe, stored queries of a bank, query rows a probe looks at


class ModelShape(NamedTuple):
    """What the operations of a prefill depend on; `parameters` are those of all decoder layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int


LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 6_979_321_856)
LENGTH = 32_768


def create(name: str, model: Any) -> Policy:
    """Return a policy with its defaults; a fitted one with random weights for `model`."""
    shape, rng = describe(model), np.random.default_rng(0)
    rows, dim = (len(shape.full_layers), shape.kv_heads), shape.head_dim
    size = 2 * dim + len(FEATURES) - 2
    if name == "kvzap":
        sizes = ((shape.hidden_size // 8, shape.hidden_size), (shape.kv_heads, shape.hidden_size // 8))
        tensors = {}
        for layer, part in product(range(shape.layers), (0, 1)):
            tensors[f"layers.{layer}.{2 * part}.weight"] = rng.normal(size=sizes[part]).astype(np.float32) * 0.01
            tensors[f"layers.{layer}.{2 * part}.bias"] = np.zeros(sizes[part][0], np.float32)
        return create_policy(name, {WEIGHTS: register_weights(save(tensors), Path(name))})
    drawn: dict[str, dict[str, tuple[int, ...]]] = {
        "probe": {"center": (size,), "scale": (size,), "linear": (size,), "hidden": (size, WIDTH),
                  "hidden_bias": (WIDTH,), "output": (WIDTH,), "bias": ()},
        "query_bank": {"queries": (shape.group, BANK, dim)},
    }  # fmt: skip
    if name not in drawn:
        return create_policy(name)
    arrays = {key: rng.random((*rows, *tail), np.float32) * 0.1 + 0.1 for key, tail in drawn[name].items()}
    metadata = ProfileMetadata(
        model=compute_fingerprint(model, "random"), method=name, policy=PolicySpec(name=name), length=LENGTH,
        questions=1,
        layers=shape.full_layers, floor=1,
        provenance=make_provenance(name, 0, None, {"features": FEATURES}, ContextRecord()),
    )  # fmt: skip
    return create_policy(name, {WEIGHTS: register_weights(Profile(metadata, arrays).to_bytes(), Path(name))})


def share_of_prefill(name: str, size: ModelShape = LLAMA_8B, length: int = LENGTH) -> float | None:
    """Return the operations of a fitted policy's scores as a share of those of the prefill; None: not counted.

    Per token and layer: matrix products alone, two operations for each product.
    """
    queries, dim, kv = size.heads, size.head_dim, size.kv_heads
    features = 2 * dim + len(FEATURES) - 2
    squares = 2 * queries * dim**2  # a quadratic form of every query head
    counted = {
        # regressions; moments of the queries and the form of ExpectedAttention; rows of SnapKV
        "probe": 2 * kv * features * (WIDTH + 1) + 2 * squares + 2 * WINDOW * queries * dim,
        "query_bank": 2 * queries * BANK * dim + squares,  # logits; norms behind the output projection
        "kvzap": 2 * (size.hidden * size.hidden // 8 + size.hidden // 8 * kv),  # its two layers, as published
    }
    if name not in counted:
        return None
    prefill = 2 * size.parameters / size.layers + 4 * queries * dim * (length + 1) / 2
    return counted[name] / prefill
