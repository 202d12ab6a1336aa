"""The residual stream of the full cache: what every layer sees of a context, and of tokens that follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from kvsearch.errors import InternalError, UsageError
from kvsearch.models.architecture import output_weight, rotary
from kvsearch.policies import Observation
from kvsearch.policies.base import Needs
from kvsearch.runtime.attention import (
    NAME,
    Logits,
    Output,
    dense_attention,
    logit_scale,
    rotary_positions,
    tag,
    valid_keys,
)
from kvsearch.runtime.cache import stock_layers
from kvsearch.runtime.collector import Collector, OutputProjection, Rotary
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.runtime.replay import Replay, replay

Tokens = tuple[Tensor, Tensor, Tensor]  # queries [1, Hq, K, D], keys [1, Hkv, K, D], values [1, Hkv, K, Dv]


@dataclass(frozen=True, eq=False)
class Followed:
    """One layer with a context of T tokens and K tokens that followed it, all under the full cache."""

    context: Observation
    tokens: Tokens
    module: nn.Module
    logits: Logits

    @property
    def index(self) -> int:
        """The model layer."""
        return self.context.layer

    @property
    def query(self) -> Tensor:
        """Queries of the tokens, [1, Hq, K, D]."""
        return self.tokens[0]

    @cached_property
    def keys(self) -> Tensor:
        """Keys of context and tokens, [1, Hkv, T + K, D]."""
        return torch.cat([self.context.keys, self.tokens[1]], 2)

    @cached_property
    def values(self) -> Tensor:
        """Values of context and tokens, [1, Hkv, T + K, Dv]."""
        return torch.cat([self.context.values, self.tokens[2]], 2)

    @cached_property
    def output_weight(self) -> Tensor:
        """W_O per query head, [Hq, Dv, d_model] fp32."""
        return output_weight(self.module, self.query.shape[1])

    def replay(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> Replay:
        """What the tokens attend to in this layer under these rules, its input as under the full cache."""
        if self.context.rotary is None:
            raise InternalError("a context was observed without rotary tables")
        return replay(self.context, prefill, decode, self.tokens, self.logits, self.context.rotary)

    @cached_property
    def undisturbed(self) -> Tensor:
        """Attention outputs under the full cache as a replay computes them, [1, Hq, K, Dv]."""
        return self.replay(None, None).outputs


class StreamLayer(DynamicLayer):  # type: ignore[misc]
    """Keeps the dense context of one layer; later tokens see it in full and are noted, but not stored."""

    def __init__(self, index: int, needs: Sequence[Needs], tables: Rotary) -> None:
        super().__init__()
        self.index, self.needs, self.rotary = index, needs, tables
        self.context: Observation | None = None
        self.followed: Followed | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        tag(key_states, self)
        return key_states, value_states

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        projection = OutputProjection(module, query.shape[1], key.shape[1])
        logits = Logits(logit_scale(query, kwargs), kwargs.get("softcap"), projection)
        if self.context is None:
            self.context = self._observed(query, key, value, mask, logits, kwargs)
            self.lazy_initialization(key, value)
            self.keys, self.values = key, value
        else:
            self.followed = Followed(self.context, (query, key, value), module, logits)
            key, value = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        return dense_attention(module, query, key, value, mask, **kwargs)

    def _observed(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits, kwargs: dict[str, Any]
    ) -> Observation:
        valid = valid_keys(mask, key.shape[0], key.shape[2], key.device)
        positions = rotary_positions(kwargs, valid, query.shape[2])
        collector = Collector(self.needs, self.rotary)
        collector.add(query, key, positions, valid, logits)
        return collector.observation(key, value, valid, positions, logits, self.index)


class Stream:
    """The full-cache pass over one context, and tokens that follow it, any number of times.

    Holds the full cache of the context, and what policies need of it, for as long as it lives.

    Args:
        model: a model whose attention implementation is "kvsearch".
        needs: the layers to look at, and what policies need of the context there.
        context: token ids [1, T].
    """

    def __init__(self, model: Any, needs: Mapping[int, Sequence[Needs]], context: Tensor) -> None:
        if model.config._attn_implementation != NAME:
            raise UsageError(f"reading the residual stream needs the attention implementation {NAME!r}")
        layers, tables = stock_layers(model), rotary(model)
        for index, wanted in needs.items():
            layers[index] = StreamLayer(index, wanted, tables)
        self.model, self.cache = model, Cache(layers=layers)
        self._forward(context)

    def follow(self, tokens: Tensor) -> Iterator[Followed]:
        """Teacher-force `tokens` [1, K] after the context, and forget them again; the layers in ascending order."""
        layers = self.cache.layers
        before = [layer.__dict__.copy() for layer in layers]
        self._forward(tokens)
        found = [layer.followed for layer in layers if isinstance(layer, StreamLayer) and layer.followed is not None]
        for layer, state in zip(layers, before, strict=True):
            layer.__dict__.update(state)
        return (replace(followed) for followed in found)  # a copy at a time: each caches its keys and values

    @torch.no_grad()
    def _forward(self, ids: Tensor) -> None:
        self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
