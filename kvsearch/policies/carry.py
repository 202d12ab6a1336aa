"""Attention Matching: kept entries carry evicted ones, by other values and a log weight added to their logits.

Attention over b kept entries with log weights beta, softmax(s q.k + beta) v', is fitted to attention over all T entries
for queries of the prompt itself (Attention Matching, arXiv 2602.16284): keys stay as they are, so that rotary positions
do. First the weights, so that each query's sum of exponentials equals the sum over all entries; then the values, so
that its output does. Queries lie evenly over the prompt, and are asked where the next tokens will stand: the last ones
as they stand look at their neighbours, and what is fitted to these is worse than nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import assert_present
from kvsearch.policies.base import Observation
from kvsearch.policies.decoding import gather_entries, list_slots
from kvsearch.policies.scoring import choose_chunk_bytes, softmax
from kvsearch.policies.tensors import F, Tensor, torch

REFERENCES = 64  # queries of every query head
AHEAD = 128  # positions behind the prompt that they are asked at
MIN_WEIGHT = math.exp(-4.0)  # weight of a kept entry; the most is as many as there are entries
SHRINKAGE = 0.01  # of weights towards 1, as a share of their mean curvature
VALUE_RIDGE = 0.1  # of values towards what they were, likewise
GRADIENT_STEPS = 20  # of the projected gradient
MIN_MASS = 1e-20


class Carried(NamedTuple):
    """Values and log weights of a prompt's entries; entries that left are as they were, and have log weight 0."""

    values: Tensor  # [B, Hkv, T, Dv]
    log_weights: Tensor  # [B, Hkv, T], in the dtype of the keys


def match_attention(observation: Observation, keep: Tensor, counts: Ints, lengths: Sequence[int]) -> Carried:
    """Fit values and log weights of the entries `keep` [B, Hkv, T] bool to attention over all; see `match_segments`.

    `counts` [B, Hkv] are how many a head keeps and `lengths` [B] how many it has: heads that keep all stay as they are.
    The observation, which has reference queries, stays as it is; nothing waits for the device.
    """
    keys = observation.keys
    batch, heads, length, dim = keys.shape
    queries, real = _place_reference_queries(observation)
    count = queries.shape[2]
    rows = queries.shape[1] // heads * count

    def by_row(states: Tensor) -> Tensor:
        """Broadcast a tensor over kv heads, their query heads and queries, [S, rows]."""
        return states.expand(batch, heads, rows // count, count).reshape(-1, rows)

    sinks = observation.sinks_of(slice(None))
    beside = None if sinks is None else by_row(sinks[..., 0])
    # Short prompts have fewer tokens than reference queries: the rest of these do not count.
    uncounted = by_row(~real[:, None, None]) if min(lengths) < count else None
    hidden = ~observation.valid.repeat_interleave(heads, 0) if min(lengths) < length else None
    rotated = (queries * observation.scaling).reshape(-1, rows, dim)
    flat_keys, flat_values, flat_keep = (tensor.flatten(0, 1) for tensor in (keys, observation.values, keep))
    # Slot -1 + 1 = 0: what belongs to no entry is written to this column, and cut off at the end.
    values = F.pad(flat_values, (0, 0, 1, 0))  # in front, a column for slots without an entry
    log_weights = keys.new_zeros(batch * heads, length + 1)
    numbers = torch.arange(length, device=keys.device)
    # Heads that keep nothing or all have nothing to fit; for them every kernel below would be wasted.
    held = counts.flatten()
    evicted = np.flatnonzero((held > 0) & (held < np.repeat(np.array(lengths), heads)))
    step = max(1, choose_chunk_bytes(keys.device) // (8 * rows * length))
    for first in range(0, len(evicted), step):
        part = evicted[first : first + step]
        index = torch.from_numpy(part).to(keys.device)
        logits = rotated[index] @ flat_keys[index].float().transpose(-1, -2)
        if observation.softcap is not None:
            logits = observation.softcap * torch.tanh(logits / observation.softcap)
        if hidden is not None:
            logits.masked_fill_(hidden[index][:, None], -math.inf)
        others = None
        if beside is not None:  # not what entries leave of 1, which is rounded: kept ones may have as little
            others = torch.sigmoid(beside[index] - logits.logsumexp(-1))
        # Softmax over all entries, not over those that are kept: kept ones carry the share of the others.
        attention = softmax(logits, None if beside is None else beside[index][..., None])
        if uncounted is not None:
            attention.masked_fill_(uncounted[index][..., None], 0.0)
        kept = flat_keep[index]
        # How many slots there are is known on the host, from the counts.
        slots = list_slots(kept, numbers.expand_as(kept), int(held[part].max()))
        fitted = match_segments(attention, flat_values[index].float(), slots, keys.dtype, others)
        values[index[:, None], slots + 1] = fitted[0].to(values.dtype)
        log_weights[index[:, None], slots + 1] = fitted[1]
    fitted_values, fitted_weights = (
        tensor.view(batch, heads, length + 1, *tensor.shape[2:])[:, :, 1:] for tensor in (values, log_weights)
    )
    return Carried(fitted_values, fitted_weights)


def match_segments(
    attention: Tensor, values: Tensor, slots: Tensor, dtype: torch.dtype, others: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fit values [S, b, Dv] fp32 and log weights [S, b] of the entries in `slots` of S kv heads.

    With A the attention of R queries to the kept entries, among all, and m what all entries get (1 but for sinks),
    w = argmin |A w - m|^2 + lambda |w - 1|^2 over e^-4 <= w <= T, where lambda is 0.01 of the mean of diag(A'A); the
    search is stopped early. With B the attention under these weights, v' = v + argmin_d |B (v + d) - o|^2 + mu |d|^2,
    where o is the output of all entries and mu is 0.1 of the mean of diag(B'B).

    Args:
        attention: [S, R, T] fp32, to all entries; 0 throughout for queries that do not count.
        values: [S, T, Dv] fp32.
        slots: [S, b] of the T entries, -1 for none.
        dtype: that of the log weights: values make up for how these are rounded.
        others: [S, R] fp32, what learned sinks get, which have no value; None: nothing.
    """
    empty = slots < 0
    where = slots.clamp(min=0)
    number = (~empty).sum(-1).clamp(min=1)
    kept = attention.gather(2, where[:, None].expand(-1, attention.shape[1], -1)).masked_fill_(empty[:, None], 0.0)
    weights = _solve_weights(kept, attention.sum(-1), number, values.shape[1])
    # Rounded to the cache's dtype first, so that values are fitted to the weights that will really be added.
    log_weights = weights.log().to(dtype).masked_fill(empty, 0.0)
    shares = kept * log_weights.float().exp()[:, None]
    total = shares.sum(-1, keepdim=True)
    # The shares that the runtime will compute: of kept entries with their weights, and of the sinks.
    shares = shares / (total if others is None else total + others[..., None]).clamp(min=MIN_MASS)
    old_values = gather_entries(values, where)
    return old_values + _solve_ridge(shares, attention @ values - shares @ old_values, number), log_weights


def _solve_weights(attention: Tensor, mass: Tensor, number: Tensor, largest: int) -> Tensor:
    """Return the weights of `match_segments`, [S, b], for `attention` [S, R, b] of `number` [S] entries.

    Accelerated projected gradient (FISTA) from weights of 1, with a step of its own for every weight: as G = A'A has no
    negative entries, diag(G 1) - G has no negative eigenvalues, and none of the steps is too long.
    """
    flipped = attention.transpose(-1, -2)
    # Fewer entries than queries: the Gram matrix [b, b] is smaller than the attention, else two products with it are.
    gram = flipped @ attention if attention.shape[2] <= attention.shape[1] else None

    def product(x: Tensor) -> Tensor:
        return (gram @ x) if gram is not None else flipped @ (attention @ x)

    ridge = (SHRINKAGE * attention.square().sum((1, 2)) / number + MIN_MASS)[:, None, None]
    weights = ahead = torch.ones_like(attention[:, :1].transpose(-1, -2))
    # A step of its own for every weight: G is at most diag(G 1), so none of them is too long.
    rate = 1 / (product(weights) + ridge)
    target = flipped @ mass[..., None] + ridge
    momentum = 1.0
    for _ in range(GRADIENT_STEPS):
        slope = product(ahead).add_(ahead * ridge).sub_(target)
        # The bounds keep log weights finite, and no entry stands for more than all.
        later = (ahead - rate * slope).clamp_(MIN_WEIGHT, float(largest))
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        # Nesterov's step: beyond the new weights, by the way they have come from the old ones.
        ahead = torch.lerp(weights, later, 1 + (momentum - 1) / following)
        weights = later
        momentum = following
    return weights[..., 0]


def _solve_ridge(shares: Tensor, residual: Tensor, number: Tensor) -> Tensor:
    """Return what is added to values, [S, b, Dv], so that `shares` [S, R, b] make up for a residual [S, R, Dv]."""
    flipped = shares.transpose(-1, -2)
    few = shares.shape[2] <= shares.shape[1]
    # The smaller of the primal and the dual system: (B'B + mu)^-1 B' = B' (BB' + mu)^-1.
    gram = flipped @ shares if few else shares @ flipped
    gram.diagonal(dim1=-2, dim2=-1).add_((VALUE_RIDGE * shares.square().sum((1, 2)) / number + MIN_MASS)[:, None])
    factor = torch.linalg.cholesky_ex(gram).L  # which does not wait for the device to say whether it could
    if few:
        return torch.cholesky_solve(flipped @ residual, factor)
    return flipped @ torch.cholesky_solve(residual, factor)


def _place_reference_queries(observation: Observation) -> tuple[Tensor, Tensor]:
    """Return the reference queries as they would be asked behind the prompt, [B, Hq, N, D] fp32, and which count."""
    from kvsearch.models.architecture import rotate

    queries, real = assert_present(
        observation.references, "what entries carry is fitted to queries that were not gathered"
    )
    rotary = assert_present(observation.rotary, "reference queries are turned, and the rotary embedding was not given")
    count = queries.shape[2]
    following = observation.following
    # Evenly over the next AHEAD positions: at their own place queries favour their neighbours.
    positions = following[:, None] + torch.arange(count, device=following.device) * AHEAD // REFERENCES
    cos, sin = (table.float().view(*positions.shape, -1) for table in rotary(positions.flatten()))
    return rotate(queries, cos, sin), real
