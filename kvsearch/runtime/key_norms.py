"""Policies that rank by the norms of keys, on models whose keys all have nearly the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn

from kvsearch.errors import KvsearchWarning
from kvsearch.models.architecture import attention_modules
from kvsearch.policies.base import Policy

KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")  # what transformers calls the normalisation of keys
# Rank by the length of a key; a third-party class says so by `key_norms = True`. KeyDiff is not among them: it compares
# directions, which do not change when every key gets the same length.
BY_KEY_NORM = ("knorm",)
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def warn_unfit(model: nn.Module, policies: Iterable[Policy]) -> None:
    """Warn of policies that can say little on this model (KvsearchWarning), once per model and policy."""
    named = {policy.name for policy in policies if policy.name in BY_KEY_NORM or getattr(policy, "key_norms", False)}
    warned = _warned.setdefault(model, set())
    for name in sorted(named - warned) if normalises_keys(model) else ():
        warned.add(name)
        warnings.warn(
            f"{type(model).__name__} normalises its keys, so their norms are nearly equal and say little about what "
            f"matters: policy {name} ranks by them, another policy will likely keep more",
            KvsearchWarning,
            stacklevel=3,
        )


def normalises_keys(model: nn.Module) -> bool:
    """Tell whether an attention layer of `model` normalises keys before it caches them, as in Qwen3 and Gemma3."""
    norms = (getattr(module, name, None) for module in attention_modules(model).values() for name in KEY_NORMS)
    return any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms)
