"""Oracle importance (LU-KV Eq. 4): what future tokens take from every cached entry under the full cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCRATCH_BYTES = 64 * 2**20


def importance_rows(
    query: Tensor,
    keys: Tensor,
    norms: Tensor | None,
    context: int,
    scaling: float,
    softcap: float | None = None,
    group: str = "sum",
) -> Tensor:
    """max_k agg_g A[q_g, k, j] |v_j W_O[q_g]|_2 over the query rows k, for the context entries j.

    `query` [B, Hq, K, D] are the last K tokens, `keys` [B, Hkv, T + K, D] all of them, `norms` [B, Hkv, G, T] (None:
    attention alone). Returns [B, Hkv, T] fp32 with T = `context`. Only K attention rows are ever computed.
    """
    parts = []
    for part, taken in _attention_rows(query, keys, context, scaling, softcap):
        if norms is not None:
            taken = taken * norms[:, part, :, None]
        parts.append(_most_over_rows(taken, group))
    return torch.cat(parts, 1)


def _attention_rows(
    query: Tensor, keys: Tensor, context: int, scaling: float, softcap: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Full-cache attention of the K query rows to the context, a few kv heads at a time, [B, heads, G, K, T] fp32."""
    batch, heads, length, _ = keys.shape
    rows = query.shape[2]
    queries = query.reshape(batch, heads, -1, rows, query.shape[-1])
    hidden = torch.ones(rows, length, dtype=torch.bool, device=keys.device).triu(length - rows + 1)
    step = max(1, SCRATCH_BYTES // (8 * batch * queries.shape[2] * rows * length))
    for first in range(0, heads, step):
        part = slice(first, first + step)
        logits = queries[:, part].float() @ keys[:, part, None].float().transpose(-1, -2) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        yield part, logits.masked_fill_(hidden, float("-inf")).softmax(-1)[..., :context]


def _most_over_rows(taken: Tensor, group: str) -> Tensor:
    """[B, heads, G, K, T] -> [B, heads, T]: over the query group first, then the largest row."""
    return (taken.amax(2) if group == "max" else taken.sum(2)).amax(2)
