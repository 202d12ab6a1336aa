"""The cache layer that evicts: it hands the dense prompt to the model's own attention, then keeps what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvsearch.errors import UsageError
from kvsearch.policies import Observation, Policy, keep_mask, rank_entries
from kvsearch.runtime.attention import NAME, Output, dense_attention, ragged_attention, tag, valid_keys
from kvsearch.runtime.collector import QueryCollector, Rotary
from kvsearch.runtime.storage import RaggedStore

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Budgets = Callable[[list[int]], Tensor]


class EvictingLayer(CacheLayerMixin):
    """Ragged per-sequence, per-kv-head storage of one full-attention layer.

    `budgets` maps the real lengths of the sequences of a batch to entries per sequence and kv head, [B, Hkv] int64.
    Eviction happens right after the layer's dense attention over the prompt, which ends when `prompt_length` tokens
    have been seen (default: with the first forward pass).
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        policy: Policy,
        budgets: Budgets,
        config: PretrainedConfig,
        rotary: Rotary,
        *,
        prompt_length: int | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.policy, self.budgets, self.config, self.rotary = policy, budgets, config, rotary
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
        if self.config._attn_implementation != NAME:
            raise UsageError(
                f"PlanCache needs the attention implementation {NAME!r}, the model runs "
                f"{self.config._attn_implementation!r}; use attach(model, plan) or "
                f"model.set_attn_implementation({NAME!r})"
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
        self._clear()
        self.is_initialized = False

    def offload(self) -> None:
        raise UsageError("PlanCache cannot be offloaded: it is small already, drop the offloading option")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count, as in transformers 5.23, or the length to keep, as before."""
        count = int(tokens_to_remove)
        count = -count if count <= 0 else self.seen - count
        if count <= 0:
            return
        if self.store is None or count > self.store.appended:
            raise UsageError(f"cannot roll back {count} tokens: eviction already removed parts of the prompt")
        self.store.crop(count)
        self.seen -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            self._select(torch.arange(self.store.batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self._select([row for row in range(self.store.batch) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        if self.store is not None:
            self.store = self.store.select_rows(rows)

    # --- attention -----------------------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Dense attention and eviction for the prompt, ragged attention for every later token."""
        if self.store is None:
            return self._prefill(module, query, key, value, mask, **kwargs)
        count = query.shape[2]
        positions = torch.arange(self.seen - count, self.seen, device=key.device).expand(key.shape[0], count)
        padded = False
        if count > 1 and mask is not None:
            valid = valid_keys(mask, key.shape[0], count, key.device)
            padded = not bool(valid.all())
            positions = torch.where(valid, positions, -1)
        self.store.append(key, value, positions, padded)
        if self.exact and (dense := self._as_dense(self.store)) is not None:
            return dense_attention(module, query, *dense, mask, **kwargs)
        output = ragged_attention(self.store, query, _scaling(query, kwargs), kwargs.get("softcap"))
        return output.transpose(1, 2).contiguous(), None

    def _prefill(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        if self._dense is not None:
            key, value = torch.cat([self._dense[0], key], 2), torch.cat([self._dense[1], value], 2)
        output = dense_attention(module, query, key, value, mask, **kwargs)
        valid = valid_keys(mask, key.shape[0], key.shape[2], key.device)
        count = query.shape[2]
        index = (valid.cumsum(-1) - 1).clamp(min=0)[:, -count:]
        self._collector.add(query, _positions(kwargs, index), valid[:, -count:])
        if self.prompt_length is not None and self.seen < self.prompt_length:
            self._dense = (key, value)
            return output
        self._evict(key, value, valid, _scaling(query, kwargs), kwargs.get("softcap"))
        return output

    def _evict(self, key: Tensor, value: Tensor, valid: Tensor, scaling: float, softcap: float | None) -> None:
        observation = Observation(
            key, value, valid, scaling, self._collector.rows, softcap, self._collector.statistics(), self.rotary
        )
        scores = self.policy.score(observation)
        ranks = rank_entries(scores, valid, self.policy.sink_count, self.policy.window_count)
        keep = keep_mask(ranks, self.budgets(observation.lengths.tolist()), valid)
        positions = torch.arange(key.shape[2], device=key.device).expand(key.shape[0], -1)
        self.store = RaggedStore.pack(key, value, keep, positions)
        self._dense, self._collector = None, QueryCollector(self.policy.needs(), self.rotary)

    def _as_dense(self, store: RaggedStore) -> tuple[Tensor, Tensor] | None:
        """Views [B, Hkv, T, D] of the store if nothing is evicted and nothing padded, else None."""
        block = store.blocks[0]
        if len(store.blocks) > 1 or block.padded or block.end != self.seen:
            return None
        shape = (store.batch, store.heads)
        return block.keys[:, : block.end].unflatten(0, shape), block.values[:, : block.end].unflatten(0, shape)

    def nbytes(self) -> int:
        """Bytes held for this layer."""
        if self.store is not None:
            return self.store.nbytes()
        return 0 if self._dense is None else sum(t.untyped_storage().nbytes() for t in self._dense)


def _scaling(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling = kwargs.get("scaling")
    return float(scaling) if scaling is not None else float(query.shape[-1] ** -0.5)


def _positions(kwargs: dict[str, Any], index: Tensor) -> Tensor:
    """Rotary positions of the query rows, [B, q]: those the model was given, else the index of each real token."""
    given = kwargs.get("position_ids")
    return index if given is None else given.expand_as(index)
