"""Fitted rankings with given or random weights, known to this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from kvsearch.plan import ModelFingerprint, PolicySpec, Profile, ProfileMetadata
from kvsearch.plan.saved import register_weights
from kvsearch.policies import Policy, create_policy, query_bank
from kvsearch.policies.probe import PROBE_METHOD
from tests.plan.builders import metadata_dict, model_dict

SCORES = ("value_norm", "expected_attention", "snapkv", "keydiff")  # a number each, whatever the model's size


def ranking(
    features: Sequence[str] = SCORES,
    width: int = 2,
    layers: Sequence[int] = (0,),
    heads: int = 1,
    size: int | None = None,
    model: ModelFingerprint | None = None,
    **arrays: Any,
) -> Profile:
    """The profile of a ranking of `size` numbers per entry; random weights where none are given."""
    rng, count = np.random.default_rng(0), len(features) if size is None else size
    shapes = {
        "center": (count,), "scale": (count,), "linear": (count,), "hidden": (count, width), "hidden_bias": (width,),
        "output": (width,), "bias": (),
    }  # fmt: skip
    found = {name: rng.normal(size=(len(layers), heads, *shape)) for name, shape in shapes.items()}
    found["scale"] = np.abs(found["scale"]) + 0.5
    found |= arrays
    both = len({"key", "value"} & set(features))
    dim = (count - len(features) + both) // both if both else 8
    like = model_dict(layers=max(layers) + 1, kv_heads=heads, head_dim=dim)
    told = metadata_dict(method=PROBE_METHOD, layers=list(layers), model=like)
    told["provenance"]["settings"] = {"features": list(features)}
    metadata = ProfileMetadata.model_validate(told)
    update: dict[str, Any] = {"policy": PolicySpec(name=PROBE_METHOD)} | ({} if model is None else {"model": model})
    return Profile(metadata.model_copy(update=update), {n: np.asarray(a, np.float32) for n, a in found.items()})


def fitted(profile: Profile | None = None, **params: Any) -> Policy:
    """The policy with these weights."""
    data = (ranking(layers=range(8)) if profile is None else profile).to_bytes()
    return create_policy(PROBE_METHOD, {"weights": register_weights(data, Path("tests")), **params})


def bank(
    queries: Any = None, dim: int = 4, layers: Sequence[int] = range(8), even: Any = None, **params: Any
) -> Policy:
    """The query bank with these queries [L, Hkv, G, N, D]; without any, the same three random ones for all heads.

    `even` [L, Hkv] marks heads that are ranked evenly; without it the file does not say.
    """
    if queries is None:
        queries = np.random.default_rng(1).normal(size=(len(layers), 1, 1, 3, dim))
    like = model_dict(layers=max(layers) + 1, kv_heads=np.shape(queries)[1], head_dim=np.shape(queries)[-1])
    told = metadata_dict(method=query_bank.QUERY_BANK_METHOD, layers=list(layers), model=like)
    metadata = ProfileMetadata.model_validate(told).model_copy(
        update={"policy": PolicySpec(name=query_bank.QUERY_BANK_METHOD)}
    )
    arrays = {"queries": queries} | ({} if even is None else {"even": even})
    profile = Profile(metadata, {name: np.asarray(array, np.float32) for name, array in arrays.items()})
    return create_policy(
        query_bank.QUERY_BANK_METHOD, {"weights": register_weights(profile.to_bytes(), Path("tests")), **params}
    )


def zap_weights(layers: int, heads: int, width: int, hidden: int | None = 3) -> dict[str, torch.Tensor]:
    """Tensors in KVzap's published layout, with two linear maps a layer, or one without `hidden`."""
    generator, found = torch.Generator().manual_seed(2), {}
    for layer in range(layers):
        shapes = {".0": (hidden, width), ".2": (heads, hidden)} if hidden else {"": (heads, width)}
        for part, (rows, columns) in shapes.items():
            found[f"layers.{layer}{part}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
            found[f"layers.{layer}{part}.bias"] = torch.randn(rows, generator=generator)
    return found


def zap(layers: int = 8, heads: int = 2, width: int = 6, **params: Any) -> Policy:
    """KVzap with small random networks."""
    data = save(zap_weights(layers, heads, width))
    return create_policy("kvzap", {"weights": register_weights(data, Path("tests") / "model.safetensors"), **params})


def example(name: str) -> Policy:
    """A built-in policy by its name, with its defaults and, if it is fitted, with small random weights."""
    return {PROBE_METHOD: fitted, query_bank.QUERY_BANK_METHOD: bank, "kvzap": zap}.get(
        name, partial(create_policy, name)
    )()
