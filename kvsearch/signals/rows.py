"""Attention logits of a few query rows over all keys, in pieces that bound the scratch memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch.policies.scoring import chunk_bytes, softmax


def score_rows(
    query: Tensor, keys: Tensor, scaling: float, softcap: float | None, tables: int, valid: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield logits of the K rows, -inf for what comes later, a few kv heads at a time, [B, heads, G, K, N] fp32.

    `query` [B, Hq, K, D] are the last K of the N tokens of `keys` [B, Hkv, N, D]. `tables` is how many fp32 tables of
    that shape the caller makes of a piece. Keys that are not `valid` [B, N] (None: all are) are -inf, too: all of a row
    is where it comes before the first valid key.
    """
    batch, heads, length, _ = keys.shape
    rows = query.shape[2]
    queries = query.reshape(batch, heads, -1, query.shape[-1])  # a kv head's query heads as rows of one matrix
    group = query.shape[1] // heads
    later = torch.ones(rows, length, dtype=torch.bool, device=keys.device).triu(length - rows + 1)
    hidden = later if valid is None else later | ~valid[:, None, None, None]
    step = max(1, chunk_bytes(keys.device) // (4 * tables * batch * group * rows * length))
    for first in range(0, heads, step):
        part = slice(first, first + step)
        scores = queries[:, part].float() @ keys[:, part].float().transpose(-1, -2) * scaling
        scores = scores.view(batch, -1, group, rows, length)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        yield part, scores.masked_fill_(hidden, float("-inf"))


def attention_rows(scores: Tensor, part: slice, sinks: Tensor | None) -> Tensor:
    """Return the attention of what `score_rows` yields; `sinks` [Hkv, G] are logits beside it that are no entry."""
    return softmax(scores, None if sinks is None else sinks[None, part, :, None, None])
