"""What several policies compute: attention rows, column sums, aggregation over the query group, pooling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvsearch.policies.base import Observation
from kvsearch.policies.tensors import F, Tensor, torch

if TYPE_CHECKING:
    from kvsearch.kernels.scoring import Rows

SCRATCH_BYTES = 48 * 2**20
CACHE_BYTES = 8 * 2**20  # scratch of a chunk that a CPU's cache can hold


def window_rows(observation: Observation, window: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the attention of the last `window` query rows, a few at a time so that scratch memory stays bounded.

    Yields (kv heads, probabilities [B, heads, G, rows, T] fp32), heads ascending and, within the same heads, rows in
    order. Rows that see nothing are all zero, padding keys get nothing.
    """
    queries, keys = observation.last_queries, observation.keys
    rows = min(window, queries.shape[2])
    batch, heads, length, dim = keys.shape
    group = observation.group
    queries = queries[:, :, -rows:].reshape(batch, heads, group, rows, dim)
    at = _places(observation, rows)
    column = observation.index[:, None]
    visible = ((column >= 0) & (column <= at[:, :, None]))[:, None, None]  # [B, 1, 1, rows, T]
    blind = ~visible.any(-1, keepdim=True)  # a row of padding, or one all of whose keys are evicted, sees nothing
    # looked at while a prompt is read, on a CPU: a decode step, and another device, is not waited for
    some_blind = keys.device.type != "cpu" or observation.token_index is not None or bool(blind.any())
    row_bytes = 8 * batch * group * length
    most = chunk_bytes(keys.device)
    row_step = min(rows, max(1, most // row_bytes))
    head_step = max(1, most // (row_bytes * rows))
    for first in range(0, heads, head_step):
        part = slice(first, first + head_step)
        head_keys = keys[:, part, None].float().transpose(-1, -2)
        for row in range(0, rows, row_step):
            some = slice(row, row + row_step)
            logits = queries[:, part, :, some].float() @ head_keys
            sinks = observation.sinks_of(part)
            probability = attention(logits, observation.scaling, observation.softcap, ~visible[:, :, :, some], sinks)
            yield part, probability.masked_fill_(blind[:, :, :, some], 0.0) if some_blind else probability


def _places(observation: Observation, rows: int) -> Tensor:
    """Return the index of the token of each of the last `rows` query rows, [B, rows]; negative where padding."""
    return observation.seen[:, None] - rows + torch.arange(rows, device=observation.keys.device)


def served_rows(observation: Observation, window: int) -> Rows | None:
    """Return the last `window` query rows for the kernels; None where these do not run."""
    from kvsearch.kernels.dispatch import serves
    from kvsearch.kernels.scoring import Rows

    queries, keys = observation.last_queries, observation.keys
    if not serves(queries, keys):
        return None
    queries = queries[:, :, -window:]
    places, sinks = _places(observation, queries.shape[2]), observation.sinks
    sinks = sinks if sinks is None or sinks.dim() == 3 else sinks[None]
    return Rows(queries, keys, observation.index, places, observation.scaling, observation.softcap, sinks)


def attention(
    logits: Tensor, scaling: float, softcap: float | None, hidden: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Take the softmax over the last axis of scaled, soft-capped fp32 `logits` (changed in place) outside `hidden`."""
    logits *= scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return softmax(logits.masked_fill_(hidden, float("-inf")), sinks)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of fp32 `scores` over the last axis, beside a further logit `sinks` [..., 1] that is no entry.

    Without sinks a row that is -inf everywhere is NaN, with them it is 0.
    """
    if sinks is None:
        return scores.softmax(-1)
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - most).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - most).exp())


def window_size(observation: Observation, window: int) -> Tensor:
    """Return how many of the last `window` query rows are real, [B] (at least 1)."""
    return observation.seen.clamp(min=1, max=window)


def mean_window_attention(observation: Observation, window: int, group: str = "mean") -> Tensor:
    """Return the mean attention of the last `window` real query rows, [B, Hkv, T] fp32, aggregated over the group.

    Shared between the policies that ask for the same window.
    """

    def compute() -> Tensor:
        heads, length = observation.keys.shape[1:3]
        if (rows := served_rows(observation, window)) is not None:
            received = rows.received("max" if group == "max" else "mean")
        else:
            received = aggregate(_window_sums(observation, window).view(-1, heads, observation.group, length), group, 2)
        return received / window_size(observation, window)[:, None, None]

    return observation.shared(("window", window, group), compute)


def window_sums(observation: Observation, window: int) -> Tensor:
    """Return the attention received from the last `window` query rows by every query head, [B, Hq, T] fp32."""
    rows = served_rows(observation, window)
    return _window_sums(observation, window) if rows is None else rows.received("heads")


def _window_sums(observation: Observation, window: int) -> Tensor:
    batch, heads, length, _ = observation.keys.shape
    total = observation.keys.new_zeros(batch, heads, observation.group, length, dtype=torch.float32)
    for part, probability in window_rows(observation, window):
        total[:, part] += probability.sum(-2)
    return total.flatten(1, 2)


def column_sums(
    queries: Tensor,
    keys: Tensor,
    valid: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Sum the attention of the last `rows` tokens to every key, [B, Hkv, T] fp32, mean over the query group (H2O).

    `queries` [B, Hq, rows, D] are the last tokens of `keys` [B, Hkv, T, D]; `valid` [B, T] bool; `sinks` [Hkv, G] are
    logits that take their share of every row. Works in chunks of query rows and only on the keys each chunk can see, so
    nothing of size T x T is made.
    """
    from kvsearch.kernels.dispatch import serves
    from kvsearch.kernels.scoring import Rows

    batch, heads, length, _ = keys.shape
    if serves(queries, keys):
        index = torch.arange(length, device=keys.device).masked_fill(~valid, -1)
        places, beside = index[:, -queries.shape[2] :], None if sinks is None else sinks[None]
        return Rows(queries, keys, index, places, scaling, softcap, beside, causal=True).received("mean")
    rows, width = queries.shape[2], queries.shape[1] // heads
    packed = queries.reshape(batch * heads, width, rows, -1)
    transposed = keys.flatten(0, 1).transpose(-1, -2)
    padding = ~valid.repeat_interleave(heads, 0)
    padded = length  # how many columns may have padding; only a CPU is asked which have any
    if valid.device.type == "cpu":
        padded = int(torch.arange(1, length + 1).masked_fill(valid.all(0), 0).amax())
    beside = None if sinks is None else sinks.repeat(batch, 1)[:, :, None, None]
    total = keys.new_zeros(batch * heads, length, dtype=torch.float32)
    for part, first, last in _chunks(batch * heads, rows, width * length, keys.device):
        count, end = last - first, length - rows + last  # `end` is what the chunk's last row sees
        logits = packed[part, :, first:last].float().flatten(1, 2) @ transposed[part, :, :end].float()
        logits = logits.mul_(scaling).view(-1, width, count, end)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., end - count :].masked_fill_(later, float("-inf"))
        if padded:
            some = slice(min(padded, end))
            logits[..., some].masked_fill_(padding[part, None, None, some], float("-inf"))
        probability = softmax(logits, None if beside is None else beside[part])
        if padded > end - count:
            probability.masked_fill_(padding[part, None, end - count : end, None], 0.0)
        total[part, :end] += probability.sum((1, 2)) / width
    return total.view(batch, heads, length)


def chunk_bytes(device: torch.device) -> int:
    """Return the scratch bytes that a chunk of work should take: what stays in a CPU's cache, more on other devices."""
    return CACHE_BYTES if device.type == "cpu" else SCRATCH_BYTES


def _chunks(segments: int, rows: int, row_size: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """Yield heads and query rows to take at a time; on a CPU one head, so that a chunk holds many rows."""
    together = 1 if device.type == "cpu" else segments
    step = max(1, chunk_bytes(device) // (8 * together * row_size))
    for head in range(0, segments, together):
        for first in range(0, rows, step):
            yield slice(head, head + together), first, min(rows, first + step)


def aggregate(scores: Tensor, how: str, dim: int) -> Tensor:
    """Aggregate over the query heads of a kv head: "mean" or "max"."""
    return scores.amax(dim) if how == "max" else scores.mean(dim)


def pool_positions(scores: Tensor, kernel: int, pooling: str, candidates: Tensor | None = None) -> Tensor:
    """Pool along positions, stride 1, over the candidates only (scores [B, Hkv, T], candidates [B, T] bool).

    Max pooling pads with -inf; average pooling pads with 0 and always divides by the kernel. Without `candidates` the
    scores, 0 or more, are 0 beside them.
    """
    if kernel <= 1 or pooling == "none":
        return scores
    empty = float("-inf") if pooling == "max" else 0.0
    if candidates is not None:
        scores = scores.masked_fill(~candidates[:, None], empty)
    return (F.max_pool1d if pooling == "max" else F.avg_pool1d)(scores, kernel, 1, kernel // 2)
