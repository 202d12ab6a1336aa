"""LU-KV: budgets by marginal gain of oracle importance, one solver for every total."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsearch.budgets.allocator import check_signals
from kvsearch.budgets.convex import merge_blocks, sort_blocks, spend_leftover, sum_prefixes
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.plan.profile_arrays import GRID_SIZE


class MarginalSolver:
    """Allocates any total over the heads of one importance table (LU-KV, Algorithm 1).

    Floors are granted first and the rest is pooled and sorted once; a solution is then the longest run of whole blocks
    that fits, and `spend_leftover` places the rest where it keeps most of the true importance: no less than where the
    next block is cut short, as in the paper. As the total rises, a leftover may move from one head to another, by less
    than the block that is split.

    Args:
        importance: [L, Hkv, T] oracle importance >= 0 in the ranking's order, protected entries first.
        floors: least entries per head, broadcasts to [L, Hkv].

    Raises:
        UsageError: importance is negative or not finite; floors are outside [0, T].
        ValueError: floors do not broadcast.

    Examples:
        >>> importance = [[[5, 4, 3, 2], [9, 1, 1, 1]]]  # one layer, two kv heads, four entries in ranked order
        >>> MarginalSolver(importance).solve(4).tolist()
        [[3, 1]]
        >>> MarginalSolver(importance, floors=2).solve(4).tolist()
        [[2, 2]]
    """

    def __init__(self, importance: ArrayLike, floors: ArrayLike = 0) -> None:
        checked = check_signals(importance, "importance", 0.0)
        self.shape = checked.shape[:2]
        self.length = checked.shape[2]
        rows = checked.reshape(-1, self.length)
        low = np.broadcast_to(np.asarray(floors, dtype=np.int64), self.shape)
        wrong = np.argwhere((low < 0) | (low > self.length))
        if wrong.size:
            at = tuple(wrong[0].tolist())
            raise UsageError(f"a floor must be in [0, {self.length}]: head {list(at)} has floor {low[at]}")
        self._floors = low.ravel()
        self._prefix = sum_prefixes(rows)
        self.blocks = sort_blocks(rows, self._floors)
        self.ends = self.least + np.concatenate([[0], np.cumsum(self.blocks.size)])

    @classmethod
    def of_layers(cls, solvers: Sequence[MarginalSolver], chosen: Ints) -> MarginalSolver:
        """Make a solver whose layer l is a layer of `solvers[chosen[l]]`, `chosen` [L]."""
        made = copy(solvers[0])
        # The solver of each head is that of its layer.
        source = np.repeat(chosen, made.shape[1])  # of each head
        made._prefix = made._prefix.copy()
        made._floors = made._floors.copy()
        parts = []
        for number in np.unique(chosen):
            solver = solvers[number]
            of_solver = source == number
            made._prefix[of_solver] = solver._prefix[of_solver]
            made._floors[of_solver] = solver._floors[of_solver]
            parts.append(solver.blocks.of_heads(of_solver))
        made.blocks = merge_blocks(parts)
        made.ends = made.least + np.concatenate([[0], np.cumsum(made.blocks.size)])
        return made

    @property
    def floors(self) -> Ints:
        """Least entries per head, [L, Hkv]."""
        return self._floors.reshape(self.shape)

    def kept_by_head(self, budgets: Ints) -> Floats:
        """Return the importance that each head keeps, by budgets [L, Hkv]: float64 [L, Hkv]."""
        flat = budgets.ravel()
        return self._prefix[np.arange(len(flat)), flat].reshape(self.shape)

    def kept(self, budgets: Ints) -> float:
        """Return the importance that all heads keep together, by budgets [L, Hkv]."""
        return float(self.kept_by_head(budgets).sum())

    @property
    def least(self) -> int:
        """The smallest total that can be met: the sum of the floors."""
        return int(self._floors.sum())

    @property
    def most(self) -> int:
        """The largest total that can be met: all entries of all heads."""
        return int(self.length * len(self._floors))

    def solve(self, total: int) -> Ints:
        """Allocate one total: int64 [L, Hkv] that sums to it exactly; UsageError outside [least, most]."""
        budgets: Ints = self.solve_many([total])[0]
        return budgets

    def solve_many(self, totals: Sequence[int] | Ints) -> Ints:
        """Allocate each total on its own: int64 [len(totals), L, Hkv]; UsageError outside [least, most]."""
        wanted = np.asarray(totals, dtype=np.int64)
        for total in wanted.tolist():
            check_reach(total, self.least, self.most)
        solved = np.empty((len(wanted), len(self._floors)), dtype=np.int64)
        # Whole blocks that fit into each total.
        taken = np.searchsorted(self.ends, wanted, side="right") - 1
        whole = self._floors.copy()
        reached = 0
        # Ascending, so that blocks are added once for all totals.
        for row in np.argsort(wanted, kind="stable"):
            np.add.at(whole, self.blocks.head[reached : taken[row]], self.blocks.size[reached : taken[row]])
            reached = int(taken[row])
            solved[row] = whole
            if left := int(wanted[row] - self.ends[reached]):
                solved[row] = spend_leftover(self._prefix, self.blocks, reached, whole, left)
        return solved.reshape(-1, *self.shape)


def solve_exactly(importance: ArrayLike, totals: Sequence[int], floors: ArrayLike = 0) -> Ints:
    """Maximise the importance kept by prefixes of every head by dynamic programming (LU-KV, Figure 2a: MCKP).

    It takes O(L * Hkv * T * the largest total), for the smaller ones, too: `MarginalSolver` is for use, this is what
    shows how little it loses.

    Args:
        importance: [L, Hkv, T] in the ranking's order.
        totals: entries of all heads together, between the sum of the floors and L * Hkv * T.
        floors: least entries per head, broadcasts to [L, Hkv].

    Returns:
        int64 [len(totals), L, Hkv] that sum to them.
    """
    values = np.asarray(importance, dtype=np.float64)
    heads = values.shape[:-1]
    low = np.broadcast_to(np.asarray(floors, dtype=np.int64), heads)
    rows = values.reshape(-1, values.shape[-1])
    choices = _solve_heads(rows, low.ravel(), max(totals))
    left = np.array(totals, dtype=np.int64)
    budgets = np.zeros((len(left), len(rows)), dtype=np.int64)
    # Backwards: the last head's choice says how much the heads before it share.
    for head in reversed(range(len(rows))):
        budgets[:, head] = choices[head, left]
        left -= budgets[:, head]
    return budgets.reshape(-1, *heads)


def _solve_heads(rows: Floats, floors: Ints, total: int) -> Ints:
    """Find head h's budget when heads 0 ... h share t entries at best: [heads, total + 1], -1 where they cannot."""
    choices = np.full((len(rows), total + 1), -1, dtype=np.int64)
    best = np.full(total + 1, -np.inf)
    best[0] = 0.0
    for head, row in enumerate(rows):
        kept = np.concatenate([[0.0], np.cumsum(row)])
        grown = np.full(total + 1, -np.inf)
        for budget in range(int(floors[head]), min(len(row), total) + 1):
            # All totals at once: the heads before get what this budget leaves.
            value = best[: total + 1 - budget] + kept[budget]
            better = value > grown[budget:]
            grown[budget:][better] = value[better]
            choices[head, budget:][better] = budget
        best = grown
    return choices


def check_reach(total: int, minimum: int, maximum: int) -> None:
    """Raise UsageError if a total is outside what the bounds of heads admit."""
    if not minimum <= total <= maximum:
        raise UsageError(f"total {total} is outside the budgets' reach: at least {minimum}, at most {maximum}")


def solve_grid(solver: MarginalSolver) -> NDArray[np.float32]:
    """Solve the 99 global eviction ratios 0.01 ... 0.99: the local eviction ratio of every head, float32 [99, L, Hkv].

    Row k - 1 keeps round_half_up((1 - k / 100) * T * L * Hkv) entries, or the nearest total within the bounds; its
    entries are 1 - budget / T (LU-KV, section 5; kvpress' curve array).
    """
    totals = compute_grid_totals(solver.length * solver.shape[0] * solver.shape[1])
    budgets = solver.solve_many(np.clip(totals, solver.least, solver.most))
    ratios: NDArray[np.float32] = (1.0 - budgets / solver.length).astype(np.float32)
    return ratios


def compute_grid_totals(entries: int) -> Ints:
    """Count how many of `entries` stay at the global eviction ratios 0.01 ... 0.99, halves upward, int64 [99]."""
    return (2 * (100 - np.arange(1, GRID_SIZE + 1, dtype=np.int64)) * entries + 100) // 200
