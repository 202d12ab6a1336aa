"""What several policies compute: window attention rows, aggregation over the query group, pooling over positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsearch.errors import InternalError
from kvsearch.policies.base import Observation

SCRATCH_BYTES = 48 * 2**20


def window_rows(observation: Observation, window: int) -> Iterator[tuple[slice, Tensor]]:
    """Attention of the last `window` query rows, a few kv heads at a time so that scratch memory stays bounded.

    Yields (kv heads, probabilities [B, heads, G, rows, T] fp32). Padding rows are all zero, padding keys get nothing.
    """
    queries, keys, valid = observation.queries, observation.keys, observation.valid
    if queries is None:
        raise InternalError("a policy asked for window attention but did not declare query rows")
    rows = min(window, queries.shape[2])
    batch, heads, length, dim = keys.shape
    group = queries.shape[1] // heads
    queries = queries[:, :, -rows:].reshape(batch, heads, group, rows, dim)
    position = torch.arange(length, device=keys.device)
    causal = position[None] <= (length - rows + torch.arange(rows, device=keys.device))[:, None]
    visible = (causal[None] & valid[:, None])[:, None, None]
    real_row = valid[:, -rows:][:, None, None, :, None]
    step = max(1, SCRATCH_BYTES // (8 * batch * group * rows * length))
    for first in range(0, heads, step):
        part = slice(first, first + step)
        logits = queries[:, part].float() @ keys[:, part, None].float().transpose(-1, -2)
        logits *= observation.scaling
        if observation.softcap is not None:
            logits = observation.softcap * torch.tanh(logits / observation.softcap)
        probability = logits.masked_fill_(~visible, float("-inf")).softmax(-1)
        yield part, probability.masked_fill_(~real_row, 0.0)


def mean_window_attention(observation: Observation, window: int, group: str = "mean") -> Tensor:
    """Mean attention of the last `window` real query rows, [B, Hkv, T] fp32, aggregated over the query group."""
    parts = [aggregate(p.sum(-2), group, dim=2) for _, p in window_rows(observation, window)]
    rows = min(window, observation.keys.shape[2])
    real_rows = observation.valid[:, -rows:].sum(-1).clamp(min=1)
    return torch.cat(parts, 1) / real_rows[:, None, None]


def aggregate(scores: Tensor, how: str, dim: int) -> Tensor:
    """Aggregate over the query heads of a kv head: "mean" or "max"."""
    return scores.amax(dim) if how == "max" else scores.mean(dim)


def pool_positions(scores: Tensor, kernel: int, pooling: str, candidates: Tensor) -> Tensor:
    """1-D pooling along positions, stride 1, over the candidates only (scores [B, Hkv, T], candidates [B, T] bool).

    Max pooling pads with -inf; average pooling pads with 0 and always divides by the kernel.
    """
    if kernel <= 1 or pooling == "none":
        return scores
    outside = ~candidates[:, None]
    if pooling == "max":
        return F.max_pool1d(scores.masked_fill(outside, float("-inf")), kernel, 1, kernel // 2)
    return F.avg_pool1d(scores.masked_fill(outside, 0.0), kernel, 1, kernel // 2)


def candidate_mask(valid: Tensor, window: int) -> Tensor:
    """Real positions outside the recent window, [B, T] bool."""
    candidates = valid.clone()
    if window:
        candidates[:, -window:] = False
    return candidates
