"""Marginal gains made non-increasing, and the blocks of equal gain an allocation is built from.

A ranking that is not perfect has marginal gains (importances in ranked order) that rise somewhere, so its eviction
loss is not convex. Isotonic regression (PAVA) of the gains pools every rise into a block with one mean gain; the prefix
sums of the result are the least concave majorant of the true ones and equal them at block ends (LU-KV, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsearch.budgets.allocator import check_signals
from kvsearch.core.arrays import Floats, Ints


@dataclass(frozen=True)
class Blocks:
    """Runs of entries with equal pooled gain, in the order they are worth keeping; all arrays are [number of blocks].

    `head` is the flat index layer * Hkv + kv head, `size` counts entries, `slope` is the pooled gain per entry.
    """

    head: Ints
    size: Ints
    slope: Floats

    def of_heads(self, heads: NDArray[np.bool_]) -> Blocks:
        """Return the blocks of `heads` of the heads, [heads]."""
        of_these = heads[self.head]
        return Blocks(self.head[of_these], self.size[of_these], self.slope[of_these])


def merge_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Return the blocks of different heads in one order, see `sort_blocks`."""
    head, size, slope = (np.concatenate([getattr(part, name) for part in parts]) for name in ("head", "size", "slope"))
    order = np.lexsort((head, size, -slope))
    return Blocks(head[order], size[order], slope[order])


def sort_blocks(rows: Floats, floors: Ints) -> Blocks:
    """Pool the entries of each head behind its floor and sort all blocks by slope, the steepest first.

    Equal slopes are sorted by size, then by layer and head. This is the order a k-way heap over each
    head's next block pops them in: slopes fall strictly inside a head, so sorting cannot break its prefix order.
    `rows` is [heads, T], `floors` are [heads].
    """
    from scipy.optimize import isotonic_regression

    gains = np.zeros_like(rows)
    length = rows.shape[1]
    for row, floor in enumerate(floors.tolist()):
        if floor < length:
            # Behind the floor alone: entries before it are granted, whatever they gain.
            gains[row, floor:] = isotonic_regression(rows[row, floor:], increasing=False).x
    rank = np.arange(length)
    inside = rank >= floors[:, None]
    first = rank == floors[:, None]
    # Pooled entries have the very same float, so a block begins where the gain changes.
    starts = inside & (first | (gains != np.roll(gains, 1, axis=1)))
    head, start = np.nonzero(starts)
    # A block ends where the next one of its head begins, the last one with the head.
    stop = np.where(np.append(head[1:] == head[:-1], False), np.append(start[1:], 0), length)
    return merge_blocks([Blocks(head, stop - start, gains[head, start])])


def sort_as_oracle(importance: ArrayLike, protected: int = 0) -> Floats:
    """Sort importance in descending order along the last axis, as if the ranking were the oracle's.

    The first `protected` entries stay in front in their order, as no ranking decides about them. Solving with it is the
    ablation of the optimality gap; evict with the real ranking (LU-KV, "w/o gap").
    """
    checked = check_signals(importance, "importance", 0.0)
    return np.concatenate([checked[..., :protected], -np.sort(-checked[..., protected:], axis=-1)], axis=-1)


def sum_prefixes(importance: NDArray[Any]) -> Floats:
    """Return what is kept of ranked importance at every budget: [..., T] -> float64 [..., T + 1], index = budget."""
    kept = np.zeros((*importance.shape[:-1], importance.shape[-1] + 1))
    np.cumsum(importance, axis=-1, dtype=np.float64, out=kept[..., 1:])
    return kept


def compute_recall(importance: ArrayLike) -> Floats:
    """Share of the importance a ranking keeps at every budget: [..., T] -> float64 [..., T + 1], index = budget.

    A head without any importance has nothing to lose: its recall is 1 at every budget.
    """
    kept = sum_prefixes(check_signals(importance, "importance", 0.0))
    mass = kept[..., -1:]
    return np.divide(kept, mass, out=np.ones_like(kept), where=mass > 0)


def compute_oracle_recall(importance: ArrayLike) -> Floats:
    """Share of the importance the best possible ranking keeps at every budget: [..., T] -> float64 [..., T + 1]."""
    return compute_recall(sort_as_oracle(importance))


def spend_leftover(prefix: Floats, blocks: Blocks, taken: int, budgets: Ints, left: int) -> Ints:
    """Place `left` entries, fewer than the block at `taken` holds, on top of the `taken` blocks in `budgets`.

    Args:
        prefix: true prefix sums of importance, [heads, T + 1].
        blocks: all blocks in the order they are taken.
        taken: how many of them `budgets` already holds.
        budgets: entries per head so far, [heads]; not changed.
        left: entries to place.

    Returns:
        int64 [heads], summing to the sum of budgets plus `left`; among equals the first candidate wins.
    """
    # Less than a block is left, so nothing is proven about any of these: the one that keeps most is taken.
    candidates = [
        _spend_on_one_head(prefix, budgets, left),
        _ByDensity(prefix, blocks, taken, budgets, left).spend(),
    ]
    # Equal slopes may be taken in any order; in head order the allocation does not depend on sizes.
    near = blocks.slope[max(taken - 1, 0) : taken + 2]
    if np.count_nonzero(near == blocks.slope[taken]) > 1:
        candidates.append(_spend_in_head_order(blocks, taken, budgets, left))
    heads = np.arange(len(budgets))
    held = prefix[heads, budgets]
    gains = [float((prefix[heads, candidate] - held).sum()) for candidate in candidates]
    return candidates[int(np.argmax(gains))]


def _spend_on_one_head(prefix: Floats, budgets: Ints, left: int) -> Ints:
    """Give everything to the head that gains most; ties go to the lower layer, then head."""
    heads = np.arange(len(budgets))
    length = prefix.shape[1] - 1
    wanted = budgets + left
    gain = prefix[heads, np.minimum(wanted, length)] - prefix[heads, budgets]
    best = int(np.where(wanted <= length, gain, -1.0).argmax())
    grown = budgets.copy()
    grown[best] += left
    return grown


def _spend_in_head_order(blocks: Blocks, taken: int, budgets: Ints, left: int) -> Ints:
    """Undo the blocks that tie with the one at `taken`, then take the tied ones in head order, cutting the last."""
    tied = np.flatnonzero(blocks.slope == blocks.slope[taken])
    undone = tied[tied < taken]
    grown = budgets.copy()
    grown[blocks.head[undone]] -= blocks.size[undone]
    left += int(blocks.size[undone].sum())
    tied = tied[np.argsort(blocks.head[tied])]  # a head has at most one block of a slope
    size = blocks.size[tied]
    grown[blocks.head[tied]] += np.clip(left - (np.cumsum(size) - size), 0, size)
    return grown


class _ByDensity:
    """Greedy choice, again and again, of the head and prefix that fits with the highest true importance per entry.

    While a head's next block fits, that block is its densest prefix and its slope the density, so whole blocks are
    taken in their sorted order, many at a time. Only a head whose next block does not fit is searched, and it stays
    cut: less and less is left, so its block never fits again.
    """

    def __init__(self, prefix: Floats, blocks: Blocks, taken: int, budgets: Ints, left: int) -> None:
        self.prefix, self.blocks, self.next, self.left = prefix, blocks, taken, left
        self.kept = budgets.copy()
        self.density = np.full(len(budgets), -np.inf)  # of the densest prefix, for cut heads only
        self.length = np.zeros(len(budgets), dtype=np.int64)

    def spend(self) -> Ints:
        while self.left:
            best = int(self.density.argmax())
            self._take_blocks(self.density[best])
            if not self.left:
                break
            if self.next < len(self.blocks.head) and self.blocks.slope[self.next] >= self.density[best]:
                self._cut(int(self.blocks.head[self.next]))
            elif self.length[best] > self.left:
                self._cut(best)
            else:
                self.kept[best] += self.length[best]
                self.left -= int(self.length[best])
                if self.left:
                    self._cut(best)
        return self.kept

    def _take_blocks(self, at_least: float) -> None:
        """Take blocks of uncut heads while they fit and are as dense as any prefix of a cut head."""
        while self.left and self.next < len(self.blocks.head):
            window = slice(self.next, self.next + self.left)
            head = self.blocks.head[window]
            slope = self.blocks.slope[window]
            # Blocks of cut heads count as nothing: these are searched entry by entry.
            size = np.where(np.isneginf(self.density[head]), self.blocks.size[window], 0)
            spent = np.cumsum(size)
            fit = int(np.count_nonzero((spent <= self.left) & (slope >= at_least)))
            np.add.at(self.kept, head[:fit], size[:fit])
            self.next += fit
            self.left -= int(spent[fit - 1]) if fit else 0
            if fit < len(head):
                return

    def _cut(self, head: int) -> None:
        """Find the densest prefix of what is left for a head; equal densities resolve to the longest."""
        held = self.kept[head]
        gains = self.prefix[head, held + 1 : held + self.left + 1] - self.prefix[head, held]
        density = gains / np.arange(1, self.left + 1)
        # Of the reversed array argmax finds the last of equal ones.
        longest = len(density) - 1 - int(density[::-1].argmax())
        self.density[head] = density[longest]
        self.length[head] = longest + 1
