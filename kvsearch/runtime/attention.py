"""Attention over a dense prompt (untouched model attention) and over a ragged store.

One function is registered with transformers under the name "kvsearch"; what it does is decided by the cache layer that
tagged the key tensor in `update`. Without a tag it is the model's stock attention, so sliding-window layers and models
without a plan behave as ever.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsearch.runtime.storage import Block, RaggedStore

NAME = "kvsearch"
TAG = "_kvsearch_layer"

Output = tuple[Tensor, Tensor | None]


class TaggingLayer(Protocol):
    """A cache layer that takes over attention for the keys it tagged."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output: ...


def tag(key: Tensor, layer: TaggingLayer) -> None:
    """Mark `key` so that the registered attention function finds the cache layer it belongs to."""
    setattr(key, TAG, layer)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Output:
    """The attention function behind the name "kvsearch"."""
    layer: TaggingLayer | None = getattr(key, TAG, None)
    if layer is None:
        return dense_attention(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(module, query, key, value, attention_mask, **kwargs)


def dense_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    """The model's own attention: SDPA, or its eager function where logits are soft-capped."""
    if kwargs.get("softcap") is None:
        sdpa: Output = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return sdpa
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output: Output = eager(module, query, key, value, additive_mask(mask, query, key), **kwargs)
    return output


def additive_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """A float mask for eager attention; None means causal."""
    rows, length = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(rows, length, dtype=torch.bool, device=key.device).tril(length - rows)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )


def valid_keys(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """The last `length` keys that are not padding, [B, length] bool, read off the last row of the attention mask."""
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    row = mask[:, 0, -1, -length:]
    return (row if row.dtype == torch.bool else row >= 0).expand(batch, length)


def ragged_attention(store: RaggedStore, query: Tensor, scaling: float, softcap: float | None = None) -> Tensor:
    """Attention of the last q tokens over a store that already holds them, [B, Hq, q, D] -> [B, Hq, q, Dv].

    The query heads of a kv head are packed into one matrix, so keys and values are read once.
    """
    batch, query_heads, rows, dim = query.shape
    group = query_heads // store.heads
    packed = query.reshape(batch * store.heads, group * rows, dim)
    if len(store.blocks) == 1:  # its segments are all segments, in order
        output = _block_attention(store.blocks[0], packed, rows, scaling, softcap)
    else:
        value_dim = store.blocks[0].values.shape[-1]
        output = query.new_empty(batch * store.heads, group * rows, value_dim)
        for block in store.blocks:
            part = _block_attention(block, packed[block.segments], rows, scaling, softcap)
            output.index_copy_(0, block.segments, part)
    return output.view(batch, query_heads, rows, -1)


def _block_attention(block: Block, query: Tensor, rows: int, scaling: float, softcap: float | None) -> Tensor:
    """[S, G * rows, D] -> [S, G * rows, Dv]: the last `rows` columns are the queries' own tokens, seen causally."""
    keys, values = block.keys[:, : block.end], block.values[:, : block.end]
    mask = block.visible
    mask = None if mask is None else mask[:, None]
    if rows > 1:
        column = torch.arange(block.end, device=keys.device)
        row = torch.arange(rows, device=keys.device)
        causal = (column[None] <= (block.end - rows + row)[:, None]).repeat(query.shape[1] // rows, 1)[None]
        mask = causal if mask is None else mask & causal
    if softcap is None:
        bias = None if mask is None else mask[:, None]
        return F.scaled_dot_product_attention(
            query[:, None], keys[:, None], values[:, None], attn_mask=bias, scale=scaling
        )[:, 0]
    logits = softcap * torch.tanh(query @ keys.transpose(-1, -2) * scaling / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.float().softmax(-1).nan_to_num(0.0).to(values.dtype) @ values


def register() -> None:
    """Make the name "kvsearch" known to transformers, with SDPA's masks (without them padding would be ignored)."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
