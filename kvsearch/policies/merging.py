"""What policies share that fold entries which leave into those that stay."""

from __future__ import annotations

from collections.abc import Iterator

from kvsearch.policies.decoding import Cached, entries_at
from kvsearch.policies.scoring import SCRATCH_BYTES
from kvsearch.policies.tensors import Tensor, torch


def in_parts(cached: Cached, leaving: Tensor, size: int) -> Iterator[tuple[Cached, Tensor]]:
    """Yield some segments at a time, as views, so that scratch of `size` bytes per segment stays bounded."""
    step = max(1, SCRATCH_BYTES // size)
    for first in range(0, len(leaving), step):
        some = slice(first, first + step)
        yield cached.segments(some), leaving[some]


def taken(states: Tensor, slots: Tensor) -> Tensor:
    """Return the states [S, C, D] at slots [S, K], [S, K, D] fp32."""
    return entries_at(states, slots).float()


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
