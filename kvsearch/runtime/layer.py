"""The cache layer that evicts: the dense prompt goes to the model's own attention, then what the plan says is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvsearch.errors import InternalError, UsageError
from kvsearch.policies import Observation, Policy, keep_mask, rank_under
from kvsearch.runtime.attention import (
    NAME,
    Output,
    causal_mask,
    dense_attention,
    logit_scale,
    ragged_attention,
    rotary_positions,
    tag,
    valid_keys,
)
from kvsearch.runtime.collector import QueryCollector, Rotary
from kvsearch.runtime.storage import RaggedStore

Budgets = Callable[[list[int]], Tensor]


class EvictingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Ragged per-sequence, per-kv-head storage of one full-attention layer.

    `budgets` maps the real lengths of the sequences of a batch to entries per sequence and kv head, [B, Hkv] int64.
    Eviction happens right after the layer's dense attention over the prompt, which ends when `prompt_length` tokens
    have been seen (default: with the first forward pass). `implementation` tells which attention the model runs now.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        policy: Policy,
        budgets: Budgets,
        implementation: Callable[[], str],
        rotary: Rotary,
        *,
        prompt_length: int | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.policy, self.budgets, self.implementation, self.rotary = policy, budgets, implementation, rotary
        self.prompt_length, self.exact = prompt_length, exact
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.store: RaggedStore | None = None
        self._dense: tuple[Tensor, Tensor] | None = None
        self._collector = QueryCollector(self.policy.needs(), self.rotary)

    # --- what transformers asks of a cache layer -----------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if (running := self.implementation()) != NAME:
            raise UsageError(
                f"PlanCache needs the attention implementation {NAME!r}, the model runs {running!r}; "
                f"use attach(model, plan) or model.set_attn_implementation({NAME!r})"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tag(key_states, self)
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """True length of the sequence, evicted entries included: positions and masks depend on it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def reset(self) -> None:
        """Forget everything, also how long the prompt was to be."""
        self._clear()
        self.prompt_length = None
        self.is_initialized = False

    def offload(self) -> None:
        raise UsageError("PlanCache cannot be offloaded: it is small already, drop the offloading option")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count, as in transformers 5.23, or the length to keep, as before."""
        count = self.croppable(tokens_to_remove)
        if count and self.store is not None:
            self.store.crop(count)
            self.seen -= count

    def croppable(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` would forget; UsageError, before anything changes, if they are evicted already."""
        count = int(tokens_to_remove)
        count = -count if count <= 0 else max(0, self.seen - count)
        held = 0 if self.store is None else self.store.appended
        if count > held:
            raise UsageError(
                f"cannot take back {count} tokens: only {held} came after the prompt, and the prompt is evicted as a "
                "whole (where drafted tokens follow the prompt at once, give PlanCache the prompt_length)"
            )
        return count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda _: beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda batch: torch.arange(batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda batch: [row for row in range(batch) for _ in range(repeats)])

    def _select(self, rows_of: Callable[[int], list[int]]) -> None:
        if self._dense is not None:
            raise UsageError("sequences cannot be rearranged in the middle of a prompt: finish it first")
        if self.store is not None:
            self.store = self.store.select_rows(rows_of(self.store.batch))

    # --- attention -----------------------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Dense attention and eviction for the prompt, ragged attention for every later token."""
        if self.store is not None:
            return self._continue(module, query, key, value, mask, **kwargs)
        length = self.seen if self.prompt_length is None else self.prompt_length
        if self.seen <= length:
            return self._prefill(module, query, key, value, mask, **kwargs)
        return self._prefill_and_continue(length, module, query, key, value, mask, **kwargs)

    def _prefill_and_continue(
        self,
        length: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Output:
        """Assisted decoding appends its first draft to the prompt: the draft must see what eviction leaves."""
        drafted = self.seen - length
        cut = query.shape[2] - drafted
        given = kwargs.pop("position_ids", None)
        self.seen = length
        prompt, _ = self._prefill(
            module,
            query[:, :, :cut],
            key[:, :, :cut],
            value[:, :, :cut],
            None if mask is None else mask[:, :, :cut, :-drafted],
            position_ids=None if given is None else given[:, :cut],
            **kwargs,
        )
        self.seen = length + drafted
        draft, _ = self._continue(
            module,
            query[:, :, cut:],
            key[:, :, cut:],
            value[:, :, cut:],
            None if mask is None else mask[:, :, cut:],
            **kwargs,
        )
        return torch.cat([prompt, draft], 1), None

    def _continue(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        store, count = self.store, query.shape[2]
        if store is None:
            raise InternalError("a cache layer was asked to continue a prompt that it has not seen")
        positions = torch.arange(self.seen - count, self.seen, dtype=torch.int32, device=key.device)[None]
        padded = False
        if count > 1 and mask is not None:
            valid = valid_keys(mask, key.shape[0], count, key.device)
            padded = not bool(valid.all())
            positions = torch.where(valid, positions, -1) if padded else positions
        store.append(key, value, positions, padded)
        if self.exact and (dense := self._as_dense(store)) is not None:
            if mask is None and count > 1:
                mask = causal_mask(count, self.seen, key.device)[None, None]
            return dense_attention(module, query, *dense, mask, **kwargs)
        output = ragged_attention(store, query, logit_scale(query, kwargs), kwargs.get("softcap"))
        return output.transpose(1, 2).contiguous(), None

    def _prefill(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        if self._dense is not None:
            key, value = torch.cat([self._dense[0], key], 2), torch.cat([self._dense[1], value], 2)
        output = dense_attention(module, query, key, value, mask, **kwargs)
        valid = valid_keys(mask, key.shape[0], key.shape[2], key.device)
        count = query.shape[2]
        positions = rotary_positions(kwargs, valid, count)
        self._collector.add(query, positions, valid[:, -count:])
        if self.prompt_length is not None and self.seen < self.prompt_length:
            self._dense = (key, value)
            return output
        observation = self._collector.observation(
            key, value, valid, positions, logit_scale(query, kwargs), kwargs.get("softcap")
        )
        self._evict(observation)
        return output

    def _evict(self, observation: Observation) -> None:
        key, valid = observation.keys, observation.valid
        if not bool(valid[:, -1].all()):
            raise UsageError("a prompt ends with padding: pad batches on the left (padding_side='left')")
        keep = keep_mask(rank_under(self.policy, observation), self.budgets(observation.lengths.tolist()), valid)
        positions = torch.arange(key.shape[2], device=key.device).expand(key.shape[0], -1)
        self.store = RaggedStore.pack(key, observation.values, keep, positions)
        self._dense, self._collector = None, QueryCollector(self.policy.needs(), self.rotary)

    def _as_dense(self, store: RaggedStore) -> tuple[Tensor, Tensor] | None:
        """Views [B, Hkv, T, D] of the store if nothing is evicted and nothing padded, else None."""
        block = store.blocks[0]
        if len(store.blocks) > 1 or block.padded or block.end != self.seen:
            return None
        shape = (store.batch, store.heads)
        keys, values = block.keys[:, : block.end], block.values[:, : block.end]
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def nbytes(self) -> int:
        """Bytes held for this layer."""
        if self.store is not None:
            return self.store.nbytes()
        return 0 if self._dense is None else sum(t.untyped_storage().nbytes() for t in self._dense)
