"""Layer attention output loss (LAVa): how far evicting entries moves what an attention layer adds to the residual.

For one query, y = concat_h(A_h V_h) W_O under the full cache, and yhat is the same with attention renormalised over the
entries that are kept. The loss is |y - yhat|_1. A bias of the output projection cancels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsearch.signals.rows import attention_rows, score_rows


class AttentionChange(NamedTuple):
    """What eviction takes from the attention of K queries."""

    outputs: Tensor  # [B, Hq, K, Dv] fp32, A V - Ahat V of every query head
    evicted: Tensor  # [B, Hq, K] fp32, attention on entries that are hidden


class LossBounds(NamedTuple):
    """Upper bounds of the loss of K queries, [B, K] fp32 each."""

    by_layer: Tensor
    by_head: Tensor


def attention_change(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    shown: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> AttentionChange:
    """Subtract renormalised attention to those `shown` from attention to all; return it with what the others had.

    `query` [B, Hq, K, D] are the last K tokens, `keys` [B, Hkv, N, D] and `values` [B, Hkv, N, Dv] are of all N tokens,
    `shown` [B, Hkv, K, N] bool has what each query attends to, itself at least; what comes after a query is hidden
    anyway. Softmax is fp32, over a few kv heads at a time. The change is exactly 0 where nothing is hidden.
    """
    outputs, evicted = [], []
    for part, scores in score_rows(query, keys, scaling, softcap, tables=4):
        hidden = ~shown[:, part, None]
        attention = attention_rows(scores, part, sinks)
        mass = (attention * hidden).sum(-1, keepdim=True)
        kept = attention_rows(scores.masked_fill_(hidden, float("-inf")), part, sinks)
        # on what is kept A - Ahat is -mass * Ahat: the difference itself would drown a small mass in rounding
        change = torch.where(hidden, attention, -mass * kept)
        outputs.append(change @ values[:, part, None].float())
        evicted.append(mass[..., 0])
    return AttentionChange(torch.cat(outputs, 1).flatten(1, 2), torch.cat(evicted, 1).flatten(1, 2))


def output_loss(change: Tensor, weight: Tensor) -> Tensor:
    """Return |change W_O|_1 of each query, [B, K] fp32 (LAVa, arXiv 2509.09754, Lemma 1 with p = 1).

    `change` [B, Hq, K, Dv] is that of the heads' outputs, `weight` [Hq, Dv, d_model] is W_O per query head, fp32.
    """
    moved = change.float().transpose(1, 2).flatten(2) @ weight.flatten(0, 1)
    return moved.abs().sum(-1)


def loss_bounds(evicted: Tensor, values: Tensor, weight: Tensor) -> LossBounds:
    """Return 2 C sum_h Vmax_h m_h (LAVa Theorem 1), and with each head's own C_h 2 sum_h C_h Vmax_h m_h, which is less.

    m_h is `evicted` [B, Hq, K], the attention that query head h loses. Vmax_h is the largest L1 norm among the values
    [B, Hkv, N, Dv] that the query sees, the K queries being the last tokens. C_h is the most that W_O, `weight`
    [Hq, Dv, d_model], makes of a unit of L1 norm in head h: the largest L1 norm of a row. C is the largest C_h.
    """
    norms = torch.linalg.vector_norm(values, ord=1, dim=-1, dtype=torch.float32)
    largest = norms.cummax(-1).values[..., values.shape[2] - evicted.shape[2] :]
    moved = 2 * evicted * largest.repeat_interleave(evicted.shape[1] // largest.shape[1], 1)
    gains = weight.abs().sum(-1).amax(-1)
    return LossBounds(gains.amax() * moved.sum(1), (gains[:, None] * moved).sum(1))
