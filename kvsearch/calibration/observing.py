"""One full-cache pass over a prompt whose layers are looked at; what follows sees the prompt, but is not stored.

Nothing here is T x T: a layer is shown as the policies of the runtime see it, with what they declare (a window of query
rows, key statistics) and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe, rotary
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import Needs
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


class ObservingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keeps the dense prompt of one layer; later tokens see it in full, or what `keep` leaves, but are not stored.

    Subclasses say in `needs` what must be gathered of the prompt, and look at it in `observe`.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, index: int, needs: Sequence[Needs], rotary_tables: Rotary) -> None:
        super().__init__()
        self.index, self.needs, self.rotary = index, needs, rotary_tables
        self.keep: Tensor | None = None  # [Hkv, T] bool: entries that later tokens may see; None: all
        self.finite = True  # whether queries, keys and values of the prompt are

    def observe(self, observation: Observation) -> None:
        """The prompt, once it has passed."""

    def measure(self, module: nn.Module, query: Tensor, key: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
        """Tokens that follow and see all of the prompt.

        `query` [1, Hq, K, D], `key` [1, Hkv, T + K, D], `output` [1, K, Hq, Dv].
        """

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
            self._prompt(module, query, key, value, mask, kwargs)
            return output
        key, value = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        if self.keep is not None:
            return dense_attention(module, query, key, value, _hidden(self.keep.to(query.device), query), **kwargs)
        output = dense_attention(module, query, key, value, mask, **kwargs)
        self.measure(module, query, key, output[0], kwargs)
        return output

    def _prompt(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        valid = valid_keys(mask, key.shape[0], key.shape[2], key.device)
        positions = rotary_positions(kwargs, valid, query.shape[2])
        projection = OutputProjection(module, query.shape[1], key.shape[1])
        logits = Logits(logit_scale(query, kwargs), kwargs.get("softcap"), projection)
        collector = Collector(self.needs, self.rotary)
        collector.add(query, key, positions, valid, logits)
        self.finite = all(bool(states.isfinite().all()) for states in (query, key, value))
        self.observe(collector.observation(key, value, valid, positions, logits, self.index))
        self.lazy_initialization(key, value)


Layer = TypeVar("Layer", bound=ObservingLayer)


class DensePass(Generic[Layer]):
    """The full-cache pass over one prompt, and the tokens that are tried after it.

    Args:
        model: a model whose attention implementation is "kvsearch".
        prompt: token ids [1, T].
        policies: the policies that will look at the prompt.
        make: from the index of a full-attention layer and the rotary tables to the layer that observes it.

    Raises:
        UsageError: the model runs another attention implementation.
        IncompatibleError: a policy wants unrotated queries, and the rotary embedding cannot be undone.
    """

    def __init__(
        self, model: Any, prompt: Tensor, policies: Sequence[Policy], make: Callable[[int, Rotary], Layer]
    ) -> None:
        if model.config._attn_implementation != NAME:
            raise UsageError(f"calibration needs the attention implementation {NAME!r}")
        check_rotary(model, policies)
        self.model, self.shape = model, describe(model)
        layers, tables = stock_layers(model), rotary(model)
        self.observed = [make(index, tables) for index in self.shape.full_layers]
        for layer in self.observed:
            layers[layer.index] = layer
        self.cache = Cache(layers=layers)
        with torch.no_grad():
            self.logits: Tensor = model(input_ids=prompt, past_key_values=self.cache, logits_to_keep=1).logits[0, -1]

    def require_numbers(self, name: str, context: int) -> None:
        """IncompatibleError if the model, called `name`, computed NaN on the prompt of the calibration's `context`."""
        if not all(layer.finite for layer in self.observed) or bool(self.logits.isnan().any()):
            raise IncompatibleError(f"{name}: the model computes NaN on calibration context {context}")

    @torch.no_grad()
    def follow(self, tokens: Tensor, **kwargs: Any) -> Any:
        """The model's output for `tokens` [1, K] after the prompt; the next call finds the prompt as it was."""
        stock = [layer for layer in self.cache.layers if not isinstance(layer, ObservingLayer)]
        before = [layer.__dict__.copy() for layer in stock]
        output = self.model(input_ids=tokens, past_key_values=self.cache, **kwargs)
        for layer, state in zip(stock, before, strict=True):
            layer.__dict__.update(state)  # sliding layers forget the tokens again
        return output

    def follow_seeing(self, tokens: Tensor, keep: Mapping[int, Tensor]) -> Tensor:
        """Logits [K, vocabulary] of `tokens` when observed layer `row` sees only the entries `keep[row]` [Hkv, T]."""
        for row, entries in keep.items():
            self.observed[row].keep = entries
        try:
            logits: Tensor = self.follow(tokens).logits[0]
        finally:
            for row in keep:
                self.observed[row].keep = None
        return logits


def _hidden(keep: Tensor, query: Tensor) -> Tensor:
    """Attention mask [1, Hq, K, T + K] that shows kept prompt entries and the later tokens' own causally."""
    rows = query.shape[2]
    prompt = keep.repeat_interleave(query.shape[1] // keep.shape[0], 0)[:, None].expand(-1, rows, -1)
    own = causal_mask(rows, rows, keep.device).expand(query.shape[1], -1, -1)
    return torch.cat([prompt, own], -1)[None]
