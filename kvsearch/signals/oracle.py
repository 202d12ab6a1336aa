"""Oracle importance (LU-KV Eq. 4): what future tokens take from every cached entry under the full cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsearch.signals.rows import attention_rows, score_rows

LEAST_NORM = 1e-6


def importance_rows(
    query: Tensor,
    keys: Tensor,
    norms: Tensor | None,
    context: int,
    scaling: float,
    softcap: float | None = None,
    group: str = "sum",
    sinks: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return max_k w_k agg_g A[q_g, k, j] |v_j W_O[q_g]|_2 over the query rows k, for the context entries j.

    `query` [B, Hq, K, D] are the last K tokens, `keys` [B, Hkv, T + K, D] all of them, `norms` [B, Hkv, G, T] (None:
    attention alone), `sinks` [Hkv, G] logits beside every row that are no entry, `weights` [B, K] the w_k (None: 1).
    Returns [B, Hkv, T] fp32 with T = `context`. Only K attention rows are ever computed.
    """
    parts = []
    for part, scores in score_rows(query, keys, scaling, softcap, tables=2):
        taken = attention_rows(scores, part, sinks)[..., :context]
        if norms is not None:
            taken = taken * norms[:, part, :, None]
        if weights is not None:
            taken = taken * weights[:, None, None, :, None]
        over_group = taken.amax(2) if group == "max" else taken.sum(2)
        parts.append(over_group.amax(2))
    return torch.cat(parts, 1)


def residual_weights(states: Tensor) -> Tensor:
    """Return 1 / |h_k| of residual streams h [B, K, d_model], [B, K] fp32: the w_k of KVzip+ (arXiv 2601.07891)."""
    weights: Tensor = 1 / states.float().norm(dim=-1).clamp(min=LEAST_NORM)
    return weights
