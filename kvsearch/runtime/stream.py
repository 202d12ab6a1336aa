"""The residual stream of the full cache: what every layer sees of a context, and of tokens that follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from kvsearch.runtime.replay import Replay, Shared, replay

Tokens = tuple[Tensor, Tensor, Tensor]  # queries [B, Hq, K, D], keys [B, Hkv, K, D], values [B, Hkv, K, Dv]


@dataclass(frozen=True, eq=False)
class Followed:
    """One layer with contexts of T tokens and K tokens that followed them, all under the full cache."""

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
        """Queries of the tokens, [B, Hq, K, D]."""
        return self.tokens[0]

    @property
    def keys(self) -> Tensor:
        """Keys of context and tokens, [B, Hkv, T + K, D]."""
        return self._shared.keys

    @property
    def values(self) -> Tensor:
        """Values of context and tokens, [B, Hkv, T + K, Dv]."""
        return self._shared.values

    @cached_property
    def output_weight(self) -> Tensor:
        """W_O per query head, [Hq, Dv, d_model] fp32."""
        return output_weight(self.module, self.query.shape[1])

    def replay(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> Replay:
        """What the tokens attend to in this layer under these rules, its input as under the full cache."""
        if self.context.rotary is None:
            raise InternalError("a context was observed without rotary tables")
        return replay(self.context, prefill, decode, self.tokens, self.logits, self.context.rotary, self._shared)

    @cached_property
    def _shared(self) -> Shared:
        return Shared.of(self.context, self.tokens, self.logits)

    @cached_property
    def undisturbed(self) -> Tensor:
        """Attention outputs under the full cache as a replay computes them, [B, Hq, K, Dv]."""
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
    """The full-cache pass over one batch of contexts, and tokens that follow them, any number of times.

    Holds the full cache of the contexts, and what policies need of them, for as long as it lives.

    Args:
        model: a model whose attention implementation is "kvsearch".
        needs: the layers to look at, and what policies need of the contexts there.
        context: token ids [B, T], padded on the left.
        mask: [B, T], 0 where padding; None: there is none.
    """

    layer: type[StreamLayer] = StreamLayer

    def __init__(
        self, model: Any, needs: Mapping[int, Sequence[Needs]], context: Tensor, mask: Tensor | None = None
    ) -> None:
        if model.config._attn_implementation != NAME:
            raise UsageError(f"reading the residual stream needs the attention implementation {NAME!r}")
        layers, tables = stock_layers(model), rotary(model)
        for index, wanted in needs.items():
            layers[index] = self.layer(index, wanted, tables)
        self.model, self.cache = model, Cache(layers=layers)
        self.mask = torch.ones_like(context) if mask is None else mask
        self.lengths: Tensor = self.mask.sum(-1)
        self._forward(context, self.mask, (self.mask.cumsum(-1) - 1).clamp(min=0))

    def follow(self, tokens: Tensor) -> Iterator[Followed]:
        """Teacher-force `tokens` [B, K] after the contexts, and forget them again; the layers in ascending order."""
        with self._forgetting():
            self._after(tokens)
            found = self._followed()
        return (replace(followed) for followed in found)  # a copy at a time: each caches its keys and values

    def _followed(self) -> list[Followed]:
        layers = self.cache.layers
        return [layer.followed for layer in layers if isinstance(layer, StreamLayer) and layer.followed is not None]

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """All layers of the cache as they were, afterwards."""
        before = [layer.__dict__.copy() for layer in self.cache.layers]
        try:
            yield
        finally:
            for layer, state in zip(self.cache.layers, before, strict=True):
                layer.__dict__.update(state)

    def _after(self, tokens: Tensor) -> Any:
        """The model's output for tokens [B, K] that follow the contexts, with logits of the last of them."""
        mask = torch.cat([self.mask, torch.ones_like(tokens)], 1)
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return self._forward(tokens, mask, positions)

    @torch.no_grad()
    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Any:
        return self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, logits_to_keep=1
        )
