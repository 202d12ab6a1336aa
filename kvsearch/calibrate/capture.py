"""One full-cache pass per context: policy ranks of its entries, then true importance from each question asked of it.

Nothing here is T x T: the ranks come from what the policy declares (a window of query rows, key statistics), the
importance from the rows of the question and answer tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe, output_weight, rotary
from kvsearch.policies import Policy, rank_under
from kvsearch.policies.projection import projected_norms
from kvsearch.runtime.attention import (
    NAME,
    Logits,
    Output,
    causal_mask,
    dense_attention,
    logit_scale,
    rotary_positions,
    tag,
    valid_keys,
)  # fmt: skip
from kvsearch.runtime.cache import check_rotary, stock_layers
from kvsearch.runtime.collector import Collector, OutputProjection, Rotary
from kvsearch.signals.effect import layer_effects
from kvsearch.signals.oracle import importance_rows


@dataclass
class Captured:
    """What one question revealed: per layer the importance [Hkv, T] fp32 and the scale of the layer's signals."""

    importance: Tensor  # [L, Hkv, T] fp32, not normalised
    output_norm: Tensor  # [L] mean L2 norm of the attention output of the question's rows
    residual_norm: Tensor  # [L] mean L2 norm of the residual stream entering the layer
    logits: Tensor  # [K, vocabulary]


class CaptureLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keeps the dense context of one layer; later tokens see it in full and are measured, but not stored."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, policies: Sequence[Policy], rotary_tables: Rotary, group: str) -> None:
        super().__init__()
        self.policies, self.rotary, self.group = policies, rotary_tables, group
        self.ranks: list[Tensor] = []
        self.norms: Tensor | None = None
        self.importance: Tensor | None = None
        self.output_norm = torch.zeros(())
        self.keep: Tensor | None = None  # [Hkv, T] bool: entries that later tokens may see; None: all

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        tag(key_states, self)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        if self.keys is None:
            output = dense_attention(module, query, key, value, mask, **kwargs)
            self._observe(module, query, key, value, mask, **kwargs)
            return output
        key, value = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        if self.keep is not None:
            return dense_attention(module, query, key, value, _hidden(self.keep.to(query.device), query), **kwargs)
        output = dense_attention(module, query, key, value, mask, **kwargs)
        self.importance = importance_rows(
            query, key, self.norms, self.get_seq_length(), logit_scale(query, kwargs), kwargs.get("softcap"), self.group
        )
        weight: Tensor = module.o_proj.weight  # type: ignore[union-attr, assignment]
        self.output_norm = nn.functional.linear(output[0].flatten(2), weight).float().norm(dim=-1).mean().cpu()
        return output

    def _observe(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> None:
        valid = valid_keys(mask, key.shape[0], key.shape[2], key.device)
        positions = rotary_positions(kwargs, valid, query.shape[2])
        projection = OutputProjection(module, query.shape[1], key.shape[1])
        logits = Logits(logit_scale(query, kwargs), kwargs.get("softcap"), projection)
        collector = Collector([policy.needs() for policy in self.policies], self.rotary)
        collector.add(query, key, positions, valid, logits)
        observation = collector.observation(key, value, valid, positions, logits)
        self.ranks = [rank_under(policy, observation) for policy in self.policies]
        self.norms = projected_norms(value, output_weight(module, query.shape[1]), "l2")
        self.lazy_initialization(key, value)


class Capture:
    """The full-cache pass over one context, and the questions asked of it.

    Args:
        model: a model whose attention implementation is "kvsearch".
        policies: the policies whose ranking of the context is wanted.
        context: token ids [1, T].
        group: how the query heads of a kv head are aggregated, "sum" or "max".
    """

    def __init__(self, model: Any, policies: Sequence[Policy], context: Tensor, group: str = "sum") -> None:
        if model.config._attn_implementation != NAME:
            raise UsageError(f"calibration needs the attention implementation {NAME!r}")
        check_rotary(model, policies)
        self.model, self.shape = model, describe(model)
        layers, tables = stock_layers(model), rotary(model)
        for index in self.shape.full_layers:
            layers[index] = CaptureLayer(policies, tables, group)
        self.cache = Cache(layers=layers)
        with torch.no_grad():
            model(input_ids=context, past_key_values=self.cache, logits_to_keep=1)

    @property
    def measured(self) -> list[CaptureLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, CaptureLayer)]

    def ranks(self, policy: int = 0) -> Tensor:
        """Ranks under the policy of that index, [L, Hkv, T] int32 on the CPU."""
        return torch.stack([layer.ranks[policy][0].cpu() for layer in self.measured])

    @torch.no_grad()
    def ask(self, tokens: Tensor) -> Captured:
        """Teacher-force `tokens` [1, K] (a question and its answer) after the context and measure what they look at."""
        output = self._forward(tokens, output_hidden_states=True)
        hidden = [output.hidden_states[index] for index in self.shape.full_layers]
        return Captured(
            torch.stack([layer.importance[0].cpu() for layer in self.measured if layer.importance is not None]),
            torch.stack([layer.output_norm for layer in self.measured]),
            torch.stack([state[0].float().norm(dim=-1).mean().cpu() for state in hidden]),
            output.logits[0],
        )

    @torch.no_grad()
    def ask_without(self, tokens: Tensor, row: int, keep: Tensor) -> Tensor:
        """Logits [K, vocabulary] of `tokens` when measured layer `row` sees only the entries `keep` [Hkv, T] bool."""
        layer = self.measured[row]
        layer.keep = keep
        try:
            logits: Tensor = self._forward(tokens).logits[0]
        finally:
            layer.keep = None
        return logits

    def effects(self, tokens: Tensor, answer: int, logits: Tensor, protected: Tensor) -> Tensor:
        """What the answer loses when one layer keeps only `protected` [L, Hkv, T] of the context, [L] nats.

        `tokens` [1, K] hold the answer from index `answer` on, `logits` [K, V] are theirs under the full cache.
        """
        predicting = slice(answer - 1, -1)  # the rows that predict the answer's tokens

        def without(row: int, keep: Tensor) -> Tensor:
            return self.ask_without(tokens, row, keep)[predicting]

        return layer_effects(logits[predicting], without, protected)

    def _forward(self, tokens: Tensor, **kwargs: Any) -> Any:
        stock = [layer for layer in self.cache.layers if not isinstance(layer, CaptureLayer)]
        before = [layer.__dict__.copy() for layer in stock]
        output = self.model(input_ids=tokens, past_key_values=self.cache, **kwargs)
        for layer, state in zip(stock, before, strict=True):
            layer.__dict__.update(state)  # sliding layers forget the question again
        return output


def _hidden(keep: Tensor, query: Tensor) -> Tensor:
    """Attention mask [1, Hq, K, T + K] that shows kept context entries and the question's own tokens causally."""
    rows = query.shape[2]
    context = keep.repeat_interleave(query.shape[1] // keep.shape[0], 0)[:, None].expand(-1, rows, -1)
    own = causal_mask(rows, rows, keep.device).expand(query.shape[1], -1, -1)
    return torch.cat([context, own], -1)[None]
