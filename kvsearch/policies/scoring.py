"""Helpers of several policies: attention rows and sums, pooling, norms of values, entries folded into others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from kvsearch.policies.base import Norm, Observation
from kvsearch.policies.decoding import Cached, gather_entries
from kvsearch.policies.tensors import F, Tensor, torch

if TYPE_CHECKING:
    from kvsearch.kernels.rows import Rows

CHUNK_BYTES = 48 * 2**20
CACHE_BYTES = 2 * 2**20  # scratch of a chunk that the cache of a CPU's core can hold

BatchPart = tuple[slice, slice]  # some sequences and kv heads of a batch


class Scratch:
    """Memory for an fp32 table of every chunk, one after the other: new memory takes a CPU longer than to fill it."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._memory = torch.empty(elements, dtype=torch.float32, device=device)

    def table(self, *shape: int) -> Tensor:
        """Return a table of this shape over the same memory, not cleared."""
        return self._memory[: math.prod(shape)].view(shape)


def iterate_window_rows(observation: Observation, window: int) -> Iterator[tuple[BatchPart, Tensor]]:
    """Yield the attention of the last `window` query rows, a few at a time so that scratch memory stays bounded.

    Yields (sequences and kv heads, their probabilities [b, h, G, rows, N] fp32), both ascending and, within the same
    ones, rows in order. Columns from N on, the next of the last row, get nothing; N is T where there is no other chunk
    of rows. Rows that see nothing are all zero, padding keys get nothing. Probabilities may be changed, and are lost
    when the next ones are asked for.
    """
    # What is kept is a choice: no gradient goes through scores.
    queries = observation.last_queries.detach()
    keys = observation.keys.detach()
    rows = min(window, queries.shape[2])
    batch, heads, length, dim = keys.shape
    group = observation.group
    queries = queries[:, :, -rows:].reshape(batch, heads, group, rows, dim)
    # Rows see tokens up to their own; by the index in the sequence, as evicted entries leave no column behind.
    at = _find_places(observation, rows)
    column = observation.index[:, None]
    hidden = ((column < 0) | (column > at[:, :, None]))[:, None, None]  # [B, 1, 1, rows, T]
    blind = hidden.all(-1, keepdim=True)  # a row of padding, or one all of whose keys are evicted, sees nothing
    # looked at while a prompt is read, on a CPU: a decode step, and another device, is not waited for
    some_blind = keys.device.type != "cpu" or observation.token_index is not None or bool(blind.any())
    scratch: tuple[Scratch, Scratch] | None = None
    for part, rows_taken in _split_rows(batch, heads, rows, choose_chunk_bytes(keys.device) // (8 * group * length)):
        chosen = queries[part][:, :, :, rows_taken]
        # evicted entries leave no trace of which column a row is
        end = length if observation.token_index is not None else length - rows + rows_taken.stop
        shape = (*chosen.shape[:4], end)
        if scratch is None:  # the first part is the largest
            size = math.prod(chosen.shape[:4]) * length
            scratch = Scratch(size, keys.device), Scratch(size, keys.device)
        # the query heads of a kv head are rows of one matrix, so that no key is copied
        packed = chosen.float().reshape(-1, group * chosen.shape[3], dim)
        transposed = keys[part][:, :, :end].float().flatten(0, 1).transpose(-1, -2)
        logits = torch.bmm(packed, transposed, out=scratch[0].table(len(packed), packed.shape[1], end)).view(shape)
        logits *= observation.scaling
        if observation.softcap is not None:
            logits = logits.div_(observation.softcap).tanh_().mul_(observation.softcap)
        rest = part[0], slice(None), slice(None), rows_taken
        logits.masked_fill_(hidden[rest][..., :end], float("-inf"))
        sinks = observation.sinks_of(part[1])
        if sinks is not None and len(sinks) > 1:
            sinks = sinks[part[0]]
        probability = softmax(logits, sinks, scratch[1].table(*shape))
        yield part, probability.masked_fill_(blind[rest], 0.0) if some_blind else probability


def _split_rows(batch: int, heads: int, rows: int, max_rows: int) -> Iterator[tuple[BatchPart, slice]]:
    """Yield sequences, kv heads and rows to take at a time, `max_rows` rows or fewer in all, if that is not none."""
    together = max(1, max_rows // rows)  # kv heads with all of their rows
    # Whole heads while rows fit, else some rows of one head: columns of a chunk should be many.
    head_step = min(heads, together)
    row_step = min(rows, max(1, max_rows))
    step = max(1, together // heads) if head_step == heads else 1
    for sequence in range(0, batch, step):
        for head in range(0, heads, head_step):
            for row in range(0, rows, row_step):
                part = slice(sequence, sequence + step), slice(head, head + head_step)
                yield part, slice(row, min(rows, row + row_step))


def _find_places(observation: Observation, rows: int) -> Tensor:
    """Return the index of the token of each of the last `rows` query rows, [B, rows]; negative where padding."""
    return observation.seen[:, None] - rows + torch.arange(rows, device=observation.keys.device)


def find_kernel_rows(observation: Observation, window: int) -> Rows | None:
    """Return the last `window` query rows for the kernels; None where these do not run."""
    from kvsearch.kernels.dispatch import serves
    from kvsearch.kernels.rows import Rows

    queries = observation.last_queries
    keys = observation.keys
    if not serves(queries, keys):
        return None
    queries = queries[:, :, -window:]
    places = _find_places(observation, queries.shape[2])
    sinks = observation.sinks
    sinks = sinks if sinks is None or sinks.dim() == 3 else sinks[None]
    return Rows(queries, keys, observation.index, places, observation.scaling, observation.softcap, sinks)


def softmax(scores: Tensor, sinks: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return the softmax of fp32 `scores` over the last axis, beside a further logit `sinks` [..., 1] that is no entry.

    Without sinks a row that is -inf everywhere is NaN, with them it is 0. `out` may be used for the result.
    """
    if sinks is None:
        return torch.softmax(scores, -1, out=out)
    maximum = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    # The sink takes part in the maximum, so that neither side overflows.
    weights = (scores - maximum).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - maximum).exp())


def count_window_rows(observation: Observation, window: int) -> Tensor:
    """Return how many of the last `window` query rows are real, [B] (at least 1)."""
    return observation.seen.clamp(min=1, max=window)


def average_window_attention(observation: Observation, window: int, group: str = "mean") -> Tensor:
    """Return the mean attention of the last `window` real query rows, [B, Hkv, T] fp32, aggregated over the group.

    Shared between the policies that ask for the same window.
    """

    def compute() -> Tensor:
        batch, heads, length, _ = observation.keys.shape
        if (rows := find_kernel_rows(observation, window)) is not None:
            received = rows.received("max" if group == "max" else "mean")
        else:
            total = observation.keys.new_zeros(batch, heads, observation.group, length, dtype=torch.float32)
            for part, probability in iterate_window_rows(observation, window):
                total[part][..., : probability.shape[-1]] += probability.sum(-2)
            received = total.amax(2) if group == "max" else total.mean(2)
        return received / count_window_rows(observation, window)[:, None, None]

    return observation.shared(("window", window, group), compute)


def sum_columns(
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
    from kvsearch.kernels.rows import Rows

    batch, heads, length, _ = keys.shape
    if serves(queries, keys):
        return Rows.of_last(queries, keys, scaling, softcap, sinks, valid).received("mean")
    rows = queries.shape[2]
    width = queries.shape[1] // heads
    packed = queries.detach().reshape(batch * heads, width, rows, -1)
    transposed = keys.detach().flatten(0, 1).transpose(-1, -2)
    padding = ~valid.repeat_interleave(heads, 0)
    padded = length  # how many columns may have padding; only a CPU is asked which have any
    if valid.device.type == "cpu":
        padded = int(torch.arange(1, length + 1).masked_fill(valid.all(0), 0).amax())
    beside = None if sinks is None else sinks.repeat(batch, 1)[:, :, None, None]
    total = keys.new_zeros(batch * heads, length, dtype=torch.float32)
    together = 1 if keys.device.type == "cpu" else batch * heads  # on a CPU one head, so that a chunk holds many rows
    step = min(rows, max(1, choose_chunk_bytes(keys.device) // (8 * together * width * length)))
    size = together * width * step * length
    scratch = Scratch(size, keys.device), Scratch(size, keys.device)
    later = torch.ones(step, step, dtype=torch.bool, device=keys.device).triu(1)
    for head, first in product(range(0, batch * heads, together), range(0, rows, step)):
        part = slice(head, head + together)
        last = min(rows, first + step)
        count = last - first
        end = length - rows + last  # what the chunk's last row sees
        query = packed[part, :, first:last].float().flatten(1, 2)
        key = transposed[part, :, :end].float()
        logits = torch.bmm(query, key, out=scratch[0].table(len(query), width * count, end))
        logits = logits.mul_(scaling).view(-1, width, count, end)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        logits[..., end - count :].masked_fill_(later[:count, :count], float("-inf"))
        if padded:
            columns = slice(min(padded, end))
            logits[..., columns].masked_fill_(padding[part, None, None, columns], float("-inf"))
        probability = softmax(logits, None if beside is None else beside[part], scratch[1].table(*logits.shape))
        if padded > end - count:
            probability.masked_fill_(padding[part, None, end - count : end, None], 0.0)
        total[part, :end] += probability.sum((1, 2)) / width
    return total.view(batch, heads, length)


def choose_chunk_bytes(device: torch.device) -> int:
    """Return the scratch bytes that a chunk of work should take: what stays in a CPU's cache, more on other devices."""
    return CACHE_BYTES if device.type == "cpu" else CHUNK_BYTES


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


def split_segments(cached: Cached, leaving: Tensor, size: int) -> Iterator[tuple[Cached, Tensor]]:
    """Yield some segments at a time, as views, so that scratch of `size` bytes per segment stays bounded."""
    step = max(1, CHUNK_BYTES // size)
    for first in range(0, len(leaving), step):
        segments = slice(first, first + step)
        yield cached.segments(segments), leaving[segments]


def gather_slots(states: Tensor, slots: Tensor) -> Tensor:
    """Return the states [S, C, D] at slots [S, K], [S, K, D] fp32."""
    return gather_entries(states, slots).float()


def fold(
    states: Tensor, targets: Tensor, own_weights: Tensor, into: Tensor, sources: Tensor, weights: Tensor, active: Tensor
) -> None:
    """Scale states[targets[r]] by own_weights[r] and add the sum over into[k] = r of weights[k] * states[sources[k]].

    In place on `states` [S, C, D], fp32 inside. `targets` [S, R] are different slots, none a source; `own_weights` are
    [S, R] fp32, 1 where nothing goes into; the others are [S, K]. Only `active` entries count.
    """
    before = gather_slots(states, targets)
    added = torch.zeros_like(before)
    # All of what leaves could be most of a prompt: it is folded some entries at a time.
    step = max(1, CHUNK_BYTES // (8 * len(states) * states.shape[-1]))
    for first in range(0, into.shape[1], step):
        segments = slice(first, first + step)
        part = (
            gather_slots(states, sources[:, segments])
            .mul_(weights[:, segments, None])
            .masked_fill_(~active[:, segments, None], 0.0)
        )
        added.scatter_add_(1, into[:, segments, None].expand_as(part), part)
    after = added.addcmul_(before, own_weights[..., None]).to(states.dtype)
    states.scatter_(1, targets[..., None].expand_as(after), after)


def projected_norms(values: Tensor, output_weight: Tensor, order: Norm) -> Tensor:
    """Return |v_i W_O[q]|, L1 or L2 by `order`, of every entry under each query head of its group, [B, Hkv, G, T] fp32.

    `values` is [B, Hkv, T, Dv], `output_weight` [Hq, Dv, d_model]. L2 norms come from the Gram matrix W W^T, so that
    each costs Dv^2 instead of Dv * d_model. Works on one query head and a few entries at a time: nothing of size
    T x d_model is made.
    """
    batch, heads, length, dim = values.shape
    weight = output_weight.float()
    factors = weight @ weight.transpose(-1, -2) if order == "l2" else weight
    factors = factors.reshape(heads, -1, dim, factors.shape[-1])
    norms = values.new_empty(batch, heads, factors.shape[1], length, dtype=torch.float32)
    step = max(1, CHUNK_BYTES // (4 * batch * (dim + factors.shape[-1])))
    for head, group in enumerate(factors):
        for first in range(0, length, step):
            part = slice(first, first + step)
            states = values[:, head, part].float()
            for member, factor in enumerate(group):
                product = states @ factor  # v W, or v W W^T
                if order == "l1":
                    norms[:, head, member, part] = torch.linalg.vector_norm(product, ord=1, dim=-1)
                else:  # rounding may leave a square just below zero
                    norms[:, head, member, part] = product.mul_(states).sum(-1).clamp(min=0).sqrt()
    return norms
