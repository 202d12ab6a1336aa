"""What policies share that fold entries which leave into those that stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvsearch.policies.decoding import Cached
from kvsearch.policies.scoring import SCRATCH_BYTES


def in_parts(cached: Cached, leaving: Tensor, size: int) -> Iterator[tuple[Cached, Tensor]]:
    """Some segments at a time, as views, so that scratch of `size` bytes per segment stays bounded."""
    step = max(1, SCRATCH_BYTES // size)
    for first in range(0, len(leaving), step):
        yield _segments(cached, slice(first, first + step)), leaving[first : first + step]


def _segments(cached: Cached, some: slice) -> Cached:
    return replace(
        cached,
        keys=cached.keys[some],
        values=cached.values[some],
        positions=cached.positions[some],
        state=cached.state.changed(lambda tensor: tensor[some], lambda tensor: tensor[some]),
        heads=cached.heads[some],
    )


def staying(cached: Cached, leaving: Tensor) -> Tensor:
    """Slots whose entries stay when those in `leaving` [S, E] go, [S, C] bool."""
    away = cached.held.new_zeros(len(leaving), cached.positions.shape[1] + 1)
    return cached.held & ~away.scatter_(1, leaving + 1, True)[:, 1:]  # -1 goes to the column in front


def by_position(cached: Cached, chosen: Tensor) -> Tensor:
    """Slots [S, C]: those `chosen` [S, C] bool by ascending position, behind them the others."""
    return cached.positions.masked_fill(~chosen, torch.iinfo(torch.int64).max).argsort(-1)


def taken(states: Tensor, slots: Tensor) -> Tensor:
    """States [S, C, D] at slots [S, K], [S, K, D] fp32."""
    return states.gather(1, slots[..., None].expand(-1, -1, states.shape[-1])).float()


def fold(
    states: Tensor, targets: Tensor, own: Tensor, into: Tensor, sources: Tensor, weights: Tensor, active: Tensor
) -> None:
    """Make states[targets[r]] its `own[r]`-fold plus the sum over into[k] = r of weights[k] * states[sources[k]].

    In place on `states` [S, C, D], fp32 inside. `targets` [S, R] are different slots, none a source, and `own` is
    [S, R] fp32, 1 where nothing goes into; the others are [S, K]. Only what is `active` counts.
    """
    before = taken(states, targets)
    added = torch.zeros_like(before)
    step = max(1, SCRATCH_BYTES // (8 * len(states) * states.shape[-1]))
    for first in range(0, into.shape[1], step):
        some = slice(first, first + step)
        part = taken(states, sources[:, some]).mul_(weights[:, some, None]).masked_fill_(~active[:, some, None], 0.0)
        added.scatter_add_(1, into[:, some, None].expand_as(part), part)
    after = added.addcmul_(before, own[..., None]).to(states.dtype)
    states.scatter_(1, targets[..., None].expand_as(after), after)
