"""Marginal gains made non-increasing, and the blocks of equal gain an allocation is built from.

A ranking that is not perfect has marginal gains (importances in ranked order) that rise somewhere, so its eviction
loss is not convex. Isotonic regression (PAVA) of the gains pools every rise into a block with one mean gain; the prefix
sums of the result are the least concave majorant of the true ones and equal them at block ends (LU-KV, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsearch.arrays import Floats, Ints
from kvsearch.errors import UsageError


@dataclass(frozen=True)
class Blocks:
    """Runs of entries with equal pooled gain, in the order they are worth keeping; all arrays are [number of blocks].

    `head` is the flat index layer * Hkv + kv head, `size` counts entries, `slope` is the pooled gain per entry.
    """

    head: Ints
    size: Ints
    slope: Floats

    def of_heads(self, some: NDArray[np.bool_]) -> Blocks:
        """Return the blocks of `some` of the heads, [heads]."""
        mine = some[self.head]
        return Blocks(self.head[mine], self.size[mine], self.slope[mine])


def merged(parts: Sequence[Blocks], small_first: bool = True) -> Blocks:
    """Return the blocks of different heads in one order, see `sorted_blocks`."""
    head, size, slope = (np.concatenate([getattr(part, name) for part in parts]) for name in ("head", "size", "slope"))
    order = np.lexsort((head, size * small_first, -slope))
    return Blocks(head[order], size[order], slope[order])


def sorted_blocks(rows: Floats, floors: Ints, caps: Ints, small_first: bool = True) -> Blocks:
    """Pool entries floors[h] to caps[h] of each head and sort all blocks by slope, the steepest first.

    Equal slopes are sorted by size if `small_first`, then by layer and head. This is the order a k-way heap over each
    head's next block pops them in: slopes fall strictly inside a head, so sorting cannot break its prefix order.
    `rows` is [heads, T], `floors` and `caps` are [heads].
    """
    from sklearn.isotonic import isotonic_regression

    gains = np.zeros_like(rows)
    for row, (floor, cap) in enumerate(zip(floors.tolist(), caps.tolist(), strict=True)):
        if floor < cap:
            gains[row, floor:cap] = isotonic_regression(rows[row, floor:cap], increasing=False)
    rank = np.arange(rows.shape[1])
    inside = (rank >= floors[:, None]) & (rank < caps[:, None])
    first = rank == floors[:, None]
    starts = inside & (first | (gains != np.roll(gains, 1, axis=1)))
    head, start = np.nonzero(starts)
    stop = np.where(np.append(head[1:] == head[:-1], False), np.append(start[1:], 0), caps[head])
    return merged([Blocks(head, stop - start, gains[head, start])], small_first)


def check_importance(importance: ArrayLike) -> Floats:
    """Return importance as float64; UsageError names the first value that is negative or not finite."""
    values = np.asarray(importance, dtype=np.float64)
    if not values.ndim:
        raise UsageError("importance must have an axis of ranked entries, got a single number")
    good = np.isfinite(values) & (values >= 0)
    if not good.all():
        at = tuple(int(axis) for axis in np.argwhere(~good)[0])
        raise UsageError(f"importance must be finite and >= 0, got {values[at]} at {list(at)}")
    return values
