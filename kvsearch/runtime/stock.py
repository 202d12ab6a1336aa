"""transformers' own caches: their layers and what these hold, and the classes of caches that models ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation.utils import ALL_CACHE_NAMES

from kvsearch.models.architecture import describe, find_decoder, find_text_config

CACHE = str(ALL_CACHE_NAMES[0])  # the argument in which models take it: past_key_values before transformers 5.24
CACHES = ("cache", "past_key_values")  # what callers may call it
MINIMAX_CACHE = "MiniMaxCache"  # of MiniMax, for the states of its lightning attention


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model; None if there is none."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def make_stock_layers(model: Any) -> list[Any]:
    """Return the layers of transformers' own cache for `model`; IncompatibleError if it is not supported."""
    shape = describe(model)
    return DynamicCache(config=find_text_config(model)).layers or [DynamicLayer() for _ in range(shape.layers)]


def find_stateful_layers(layers: Sequence[Any]) -> list[int]:
    """Return the indices of layers that carry a running state from token to token (linear attention, convolutions)."""
    return [index for index, layer in enumerate(layers) if hasattr(layer, "recurrent_states")]


def read_layer_state(layer: Any) -> dict[str, Any]:
    """Return the attributes of a stock layer as they are now, unchanged by later tokens.

    A running state is copied, as it is written in place; keys and values are replaced when others come.
    """
    # A running state is written in place, keys and values are replaced: only the former has to be copied.
    return deepcopy(vars(layer)) if find_stateful_layers([layer]) else dict(vars(layer))


def fork_layer(layer: Any) -> Any:
    """Return an independent copy of a stock layer."""
    made = copy(layer)
    vars(made).update(read_layer_state(layer))
    return made


def join_states(states: Sequence[Any]) -> Any:
    """Join running states, or dictionaries of them, as one batch; what is no tensor is that of the first."""
    first = states[0]
    if isinstance(first, dict):
        return {key: join_states([state[key] for state in states]) for key in first}
    return torch.cat(list(states)) if isinstance(first, Tensor) else first


def count_stock_bytes(layer: Any) -> int:
    """Return the bytes of cache storage allocated now, in a layer of transformers' own."""
    groups = (value.values() if isinstance(value, dict) else (value,) for value in vars(layer).values())
    tensors = (part for group in groups for part in group if isinstance(part, Tensor))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def make_cache_class(model: nn.Module, base: Any) -> type[Any]:
    """Return `base`, or a subclass of it and of the cache class that the code of `model` expects."""
    kind: type[Any] = _find_class(type(find_decoder(model)).__module__, base)
    return kind


@lru_cache(maxsize=32)
def _find_class(module: str, base: Any) -> Any:
    own: Any = getattr(import_module(module), MINIMAX_CACHE, None)
    if own is None or issubclass(base, own):
        return base
    members = {name: getattr(base, name) for name in ("__len__", "batch_repeat_interleave", "batch_select_indices")}
    # running states are kept where other models keep them, in the layers of the cache
    members["set_linear_cache"] = lambda self, layer_idx, state: self.layers[layer_idx].update_recurrent_state(state)
    members["get_linear_cache"] = lambda self, layer_idx: self.layers[layer_idx].recurrent_states[0]
    # MiniMax's class has an __init__ without layers; ours are given some.
    if base is Cache:
        members["__init__"] = vars(Cache)["__init__"]
    return type(base.__name__, (own,) if base is Cache else (base, own), members)
