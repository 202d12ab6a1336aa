"""Models whose code accepts no cache but of a class of its own."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvsearch.models.architecture import decoder

OWN = "MiniMaxCache"  # of MiniMax, for the states of its lightning attention


def cache_class(model: nn.Module, base: type[Any]) -> type[Any]:
    """Return `base`, or what is both it and the class that the code of `model` asks for."""
    own: Any = getattr(sys.modules[type(decoder(model)).__module__], OWN, None)
    if own is None or issubclass(base, own):
        return base
    members = {name: getattr(Cache, name) for name in ("__len__", "batch_repeat_interleave", "batch_select_indices")}
    members |= {"set_linear_cache": _set_linear_cache, "get_linear_cache": _get_linear_cache}
    if base is Cache:
        members["__init__"] = vars(Cache)["__init__"]
    return type(base.__name__, (own,) if base is Cache else (base, own), members)


def _set_linear_cache(self: Any, layer_idx: int, linear_cache: Tensor) -> None:
    """Keep a running state where other models do: in the layer of the cache."""
    self.layers[layer_idx].update_recurrent_state(linear_cache)


def _get_linear_cache(self: Any, layer_idx: int) -> Tensor | None:
    state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
    return state
