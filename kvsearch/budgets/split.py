"""What to do with the entries left over when the next block does not fit.

Inside a block the pooled gains promise more than the first entries deliver, so cutting a block short is not optimal.
The leftover is instead spent on the best, by true importance, of these candidates: all of it on one head; step by step
on whatever prefix of whatever head has the highest importance per entry; and, where blocks tie with the one that
does not fit, the paper's allocation, which takes tied blocks in the order of heads. So it never loses to the paper's.
"""

from __future__ import annotations

import numpy as np

from kvsearch.arrays import Floats, Ints
from kvsearch.budgets.convex import Blocks


def spend_leftover(prefix: Floats, caps: Ints, blocks: Blocks, taken: int, budgets: Ints, left: int) -> Ints:
    """Place `left` entries, fewer than the block at `taken` holds, on top of the `taken` blocks in `budgets`.

    Args:
        prefix: true prefix sums of importance, [heads, T + 1].
        caps: most entries per head, [heads].
        blocks: all blocks in the order they are taken.
        taken: how many of them `budgets` already holds.
        budgets: entries per head so far, [heads]; not changed.
        left: entries to place.

    Returns:
        int64 [heads], summing to the sum of budgets plus `left`; among equals the first candidate wins.
    """
    candidates = [_on_one_head(prefix, caps, budgets, left), _ByDensity(prefix, blocks, taken, budgets, left).spend()]
    near = blocks.slope[max(taken - 1, 0) : taken + 2]
    if np.count_nonzero(near == blocks.slope[taken]) > 1:
        candidates.append(_in_head_order(blocks, taken, budgets, left))
    heads = np.arange(len(budgets))
    held = prefix[heads, budgets]
    gains = [float((prefix[heads, candidate] - held).sum()) for candidate in candidates]
    return candidates[int(np.argmax(gains))]


def _on_one_head(prefix: Floats, caps: Ints, budgets: Ints, left: int) -> Ints:
    """Give everything to the head that gains most; ties go to the lower layer, then head."""
    heads = np.arange(len(budgets))
    wanted = budgets + left
    gain = prefix[heads, np.minimum(wanted, caps)] - prefix[heads, budgets]
    best = int(np.where(wanted <= caps, gain, -1.0).argmax())
    grown = budgets.copy()
    grown[best] += left
    return grown


def _in_head_order(blocks: Blocks, taken: int, budgets: Ints, left: int) -> Ints:
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
    """Repeatedly the head and prefix, no longer than what is left, with the highest true importance per entry.

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
            head, slope = self.blocks.head[window], self.blocks.slope[window]
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
        longest = len(density) - 1 - int(density[::-1].argmax())
        self.density[head], self.length[head] = density[longest], longest + 1
