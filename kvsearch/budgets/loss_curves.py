"""Budgets from measured losses: every layer has a curve of what it loses at a few budgets, and the sum is minimised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsearch.budgets.allocator import Signals, check_signals, lift_floors
from kvsearch.core.arrays import Floats, Ints
from kvsearch.plan.rounding import check_bounds, water_fill


@dataclass(frozen=True)
class LossCurves:
    """Minimises the sum of the layers' losses; each is known at some budgets and linear between them.

    A curve is made convex first (its lower hull), as a loss that is measured on few samples need not fall everywhere.
    Then the steepest piece of all curves is bought first, which no other split of the total improves on (marginal
    analysis: Fox 1966, Operations Research 14). Where gains are equal, as where no layer loses anything more, the
    smallest budgets are raised first. No layer gets less than the first known budget; a total that does not reach it
    everywhere is shared equally.

    Args:
        budgets: where losses are known, in entries per kv head, ascending. At the last one nothing is lost: it is the
            length of the prompts. Two or more, of at least one entry.

    Examples:
        >>> floors = np.zeros((2, 1), dtype=np.int64)
        >>> losses = np.array([[4.0, 1.0], [1.0, 0.5]])  # of two layers at 8 and 16 entries; at 32 nothing is lost
        >>> LossCurves((8, 16, 32)).allocate(losses, 40, floors, floors + 32).tolist()
        [[24], [16]]
    """

    budgets: tuple[int, ...]

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Allocate `total` entries by losses [L, len(budgets) - 1] in any unit; heads of a layer share equally.

        The losses are those at all but the last budget, at which they are zero. Negative ones count as zero.

        Returns:
            int64 [L, Hkv].

        Raises:
            UsageError: a loss is not finite or they have another shape; `total` is outside [sum of floors, sum of
                caps].
        """
        low, high = check_bounds(np.shape(floors), total, floors, caps)
        losses = check_signals(signals, "losses")
        knots = np.array(self.budgets, dtype=np.int64)
        whole = np.concatenate([np.maximum(losses, 0.0), np.zeros((len(losses), 1))], axis=1)
        # With convex curves the steepest piece of all is always the next to buy.
        curves = make_convex(knots.astype(np.float64), whole)
        have = lift_floors(int(knots[0]), total, low, high)
        gain = np.diff(-curves, axis=1) / np.diff(knots)
        sums = _buy_entries(np.maximum(gain, 0.0), knots * low.shape[1], total, have.sum(axis=1), high.sum(axis=1))
        rows = zip(sums.tolist(), have, high, strict=True)
        return np.stack([water_fill(np.ones(low.shape[1]), kept, *bounds) for kept, *bounds in rows])

    def allocate_jointly(self, losses: Floats, total: int, floors: Ints, caps: Ints) -> tuple[Ints, Ints]:
        """Return budgets by the least of the losses [L, R, len(budgets) - 1] under R patterns, and the patterns, [L].

        A layer's loses least at the known budget nearest to its own, as ratios go; the first of equals.
        """
        budgets = self.allocate(losses.min(axis=1), total, floors, caps)
        known = np.log(np.array(self.budgets[:-1], dtype=np.float64))
        # As ratios go: 8 and 16 entries differ as much as 512 and 1,024.
        nearest = np.abs(np.log(np.maximum(budgets.mean(axis=1), 1.0))[:, None] - known).argmin(axis=1)
        return budgets, losses[np.arange(len(losses)), :, nearest].argmin(axis=1)


def make_convex(at: Floats, values: Floats) -> Floats:
    """Return the largest convex curves below `values` [L, N] at the places `at` [N], read there again."""
    return np.stack([_find_hull(at, row) for row in values])


def _find_hull(at: Floats, values: Floats) -> Floats:
    """Walk Andrew's monotone chain, lower half."""
    kept: list[int] = []
    for new in range(len(at)):
        while len(kept) > 1:
            first, middle = kept[-2:]
            left = (values[middle] - values[first]) * (at[new] - at[first])
            right = (values[new] - values[first]) * (at[middle] - at[first])
            if left < right:  # the middle point is below the line through the other two
                break
            kept.pop()
        kept.append(new)
    return np.interp(at, at[kept], values[kept])


def _buy_entries(gain: Floats, knots: Ints, total: int, have: Ints, caps: Ints) -> Ints:
    """Raise the entries of layers [L] from `have` towards `caps`: the best pieces of [L, K - 1] first, then any."""
    ends = np.array([0, *knots[1:], max(int(caps.max()), int(knots[-1]))])  # a cap may keep heads below the first knot
    room = np.diff(np.clip(ends, have[:, None], caps[:, None]), axis=1)
    priced = np.concatenate([gain, np.zeros((len(gain), 1))], axis=1)
    # All pieces of one price together: shared out evenly where they are not all bought.
    for price in np.unique(priced)[::-1]:
        more = np.where(priced == price, room, 0).sum(axis=1)
        if int(have.sum() + more.sum()) >= total:
            return water_fill(np.ones(len(have)), total, have, have + more)
        have = have + more
    return have
