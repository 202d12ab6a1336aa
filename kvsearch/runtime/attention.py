"""Attention over a dense prompt (untouched model attention) and over a ragged store.

One function is registered with transformers under the name "kvsearch"; what it does is decided by the cache layer that
tagged the key tensor in `update`. Without a tag it is the model's stock attention, so sliding-window layers and models
without a plan behave as ever.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.kernels import attention as kernels
from kvsearch.kernels.dispatch import serves
from kvsearch.policies.decoding import Cached
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.store.flat import AnyBlock
from kvsearch.runtime.store.storage import RaggedStore

NAME = "kvsearch"
TAG = "_kvsearch_layer"
NO_WEIGHTS = "attention under a plan gives no weights, as SDPA gives none: `attentions` are empty; eager gives them"
NO_DRAFTS = (
    "prompt lookup and assisted decoding take attention weights apart, and attention under a plan gives none: drop "
    "output_attentions"
)
NO_DRAFTS_TAKEN_BACK = (
    "prompt lookup and assisted decoding take tokens back, and under a plan that evicts while decoding what these "
    "displaced is gone: drop the option, or use a plan without a decode phase"
)
NO_SHARED_DRAFTS = (
    "prompt lookup and assisted decoding draft tokens before all layers have seen the prompt, and this plan's layers "
    "share their entries: drop the option, or use a static plan"
)

EAGER_LOGITS = 2**28  # 512 MiB in bf16

Output = tuple[Tensor, Tensor | None]


def tag(key: Tensor, layer: Any) -> None:
    """Mark `key` so that the registered attention function leaves attention to the cache layer it belongs to."""
    setattr(key, TAG, layer)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Output:
    """Serve as the attention function behind the name "kvsearch"."""
    layer = getattr(key, TAG, None)
    if kwargs.pop("output_attentions", False):
        if getattr(layer, "drafts", False):
            raise UsageError(NO_DRAFTS)
        warnings.warn(NO_WEIGHTS, KvsearchWarning, stacklevel=2)
    if layer is None:
        return attend_dense(module, query, key, value, attention_mask, **kwargs)
    attended: Output = layer.attend(module, query, key, value, attention_mask, **kwargs)
    return attended


def attend_dense(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    """Run the model's own attention: SDPA, or its eager function where that is not all it does to logits.

    Eager attention takes some query rows at a time, so that no more than `EAGER_LOGITS` logits are there at once.
    """
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        sdpa: Output = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return sdpa
    # Soft caps and learned sinks are in the model's own file, under a name that all files of transformers share.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    rows = query.shape[2]
    length = key.shape[2]
    step = max(1, EAGER_LOGITS // (query.shape[0] * query.shape[1] * length))
    outputs = []
    for first in range(0, rows, step):
        part = query[:, :, first : first + step]
        if mask is None:
            count = part.shape[2]
            # The diagonal moves with the chunk: row r of all sees columns up to length - rows + r.
            visible = torch.ones(count, length, dtype=torch.bool, device=key.device).tril(length - rows + first)
            mask_visible = make_additive_mask(visible[None, None], query.dtype)
        else:
            mask_visible = make_additive_mask(mask[:, :, first : first + step], query.dtype)
        outputs.append(eager(module, part, key, value, mask_visible, **kwargs)[0])
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), None


def can_use_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether flash attention takes queries of the last tokens and all keys and values, without a mask."""
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))


def attend_flash(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend causally with the last tokens, [B, Hq, q, D], to all of them, [B, q, Hq, Dv]."""
    bias = causal_lower_right(query.shape[2], key.shape[2])
    output = F.scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


def make_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a float mask for eager attention."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def make_causal_mask(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last `rows` of `length` tokens, [rows, length] bool."""
    return torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows)


def find_valid_keys(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Return which of the last `length` keys are no padding, [B, length] bool, by the last row of the mask."""
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    row = mask[:, 0, -1, -length:]
    return (row if row.dtype == torch.bool else row >= 0).expand(batch, length)


def make_rotary_positions(kwargs: dict[str, Any], valid: Tensor, count: int) -> Tensor:
    """Return rotary positions of the last `count` rows, [B, count]: those given to the model, else token indices."""
    index = (valid.cumsum(-1) - 1).clamp(min=0)[:, -count:]
    positions = kwargs.get("position_ids")
    return index if positions is None else positions.expand_as(index)


def attend_ragged(store: RaggedStore, query: Tensor, logits: Logits, visible: Tensor | None = None) -> Tensor:
    """Attend with the last q tokens to a store that already holds them, [B, Hq, q, D] -> [B, Hq, q, Dv].

    The query heads of a kv head are packed into one matrix, so keys and values are read once. `visible` [B, T] bool
    says which tokens are seen, by their index in the sequence (None: all).
    """
    batch, query_heads, rows, dim = query.shape
    parts = store.split(query.reshape(batch * store.heads, 1, -1, dim))
    output = store.join(
        [
            _attend_block(block, part, rows, logits, store.heads)
            for block, part in zip(store.showing(visible), parts, strict=True)
        ]
    )
    return output.view(batch, query_heads, rows, -1)


def _attend_block(held: AnyBlock, query: Tensor, rows: int, how: Logits, heads: int) -> Tensor:
    """[S, 1, G * rows, D] -> [S, 1, G * rows, Dv]: the last `rows` columns are the queries' own, seen causally."""
    # The kv head of each segment, which learned sinks are looked up by; without sinks nothing reads it.
    heads_of_rows = held.segments if how.sinks is None else held.segments % heads
    if serves(query, held.keys, held.values):
        made, _ = kernels.attend(
            query[:, 0], held.for_kernels(), how.scaling, how.softcap, how.sinks_of(heads_of_rows), rows
        )
        return made.unsqueeze(1)
    block = held.aligned()
    count = block.columns
    keys = block.keys.narrow(1, 0, count).unsqueeze(1)
    values = block.values.narrow(1, 0, count).unsqueeze(1)
    bias = block.bias
    if bias is not None:
        bias = bias[:, None, None]
    if rows > 1:
        # The last `rows` columns are these tokens' own, each visible from its token on, for every head of the group.
        later = ~make_causal_mask(rows, count, keys.device).repeat(query.shape[2] // rows, 1)[None, None]
        bias = (keys.new_zeros(1, 1, 1, 1) if bias is None else bias).masked_fill(later, float("-inf"))
    if how.plain:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=how.scaling)
    logits = how.of(query, keys)
    if bias is not None:
        logits = logits + bias
    weights = how.softmax(logits.view(len(logits), query.shape[2] // rows, rows, count), heads_of_rows).view_as(logits)
    # A row of padding may see nothing: its softmax is NaN, and would spread to real tokens in the next layer.
    return weights.nan_to_num(0.0).to(values.dtype) @ values


def attend_slots(
    query: Tensor,
    cached: Cached,
    bias: Tensor | None,
    logits: Logits,
    want_row: bool,
    into: Tensor | None = None,
    full: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with one token per segment to its slots: [S, G, D] -> [S, G, Dv], and its row if wanted.

    Kernels see in the positions which slots have an entry, unless all are `full`. Elsewhere `bias` [S, C] is -inf where
    a slot has no entry, else 0, in fp32 if the row is wanted, else in the keys' dtype; None: every slot has one. What
    entries carry is added. The row is the mean over the group, [S, C] fp32, written to `into` if that is given.
    """
    keys = cached.keys
    values = cached.values
    weights = cached.log_weights
    if serves(query, keys, values):
        positions = None if full else cached.positions
        held = kernels.Entries(keys, values, keys.shape[1], positions=positions, log_weights=weights)
        sinks = logits.sinks_of(cached.heads)
        return kernels.attend(query, held, logits.scaling, logits.softcap, sinks, want_row=want_row, into=into)
    if weights is not None:
        bias = weights if bias is None else bias + weights
    # SDPA never shows its weights: where a policy reads them they are computed here.
    if not want_row and logits.plain:
        mask = None if bias is None else bias[:, None, None]
        states = (query.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1))
        return F.scaled_dot_product_attention(*states, attn_mask=mask, scale=logits.scaling).squeeze(1), None
    shares = logits.softmax(logits.of(query, keys, None if bias is None else bias[:, None].float()), cached.heads)
    output = shares.to(values.dtype) @ values
    if not want_row:
        return output, None
    shares = shares.detach()
    if into is not None and into.is_contiguous():
        return output, torch.mean(shares, 1, out=into)
    row = shares.mean(1)
    return output, row if into is None else into.copy_(row)


def require_attention(what: str, runs: str) -> None:
    """Raise a UsageError if a model `runs` another attention implementation than "kvsearch", which `what` needs."""
    if runs != NAME:
        raise UsageError(
            f"{what} needs the attention implementation {NAME!r}, the model runs {runs!r}; "
            f"use attach(model, plan) or model.set_attn_implementation({NAME!r})"
        )


@contextmanager
def use_attention(model: Any, implementation: str) -> Iterator[None]:
    """Let `model` run another attention implementation for a while, then its own again."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def run_attention(model: Any) -> AbstractContextManager[None]:
    """Let `model` run the attention "kvsearch" for a while, then its own again."""
    return use_attention(model, NAME)


def check_mask(**given: Any) -> Tensor | None:
    """Make SDPA's mask of an attention mask [B, T], after checking its length, which transformers does not do.

    Raises:
        UsageError: it is not as long as what was read and what comes.
    """
    mask = given.get("attention_mask")
    read = given.get("q_offset")
    come = given.get("q_length")
    if mask is not None and isinstance(read, int) and isinstance(come, int):
        columns = mask.shape[-1]
        keys = given["kv_length"] + given.get("kv_offset", 0)
        if columns not in (read + come, keys):  # static caches have more keys
            raise UsageError(
                f"attention_mask has {columns} columns: {read} tokens were read and {come} come, so it takes "
                f"{read + come}"
            )
    made: Tensor | None = sdpa_mask(**given)
    return made


def register() -> None:
    """Make the name "kvsearch" known to transformers, with SDPA's masks (without them padding would be ignored)."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, check_mask)


register()
