"""PolyKV's layer budgets: a guaranteed minimum and a share of the rest in proportion to a sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvsearch.budgets.allocator import Signals, check_signals, lift_floors, share_above
from kvsearch.core.arrays import Floats, Ints
from kvsearch.plan.rounding import check_bounds, largest_remainder
from kvsearch.plan.size import round_half_up

Direction = Literal["forward", "inverse"]


@dataclass(frozen=True)
class Proportional:
    """PolyKV (arXiv 2606.15157, Eq. 6): x_l = b_min + (B - L * b_min) * S_l / sum_j S_j, rounded to the exact total.

    The signal S is a sensitivity in any unit, [L] for heads that share a layer's budget equally or [L, Hkv] for budgets
    by head. Negative values (a perplexity may fall) count as 0, and eps = 1e-12 + 1e-6 * mean |S| is added to all, so
    all-zero signals, and those far below 1e-12, mean equal budgets. Where a cap binds, the shares of the others rise in
    proportion.

    Args:
        direction: "inverse" hands out the forward budgets in reverse, as a control: the most sensitive layer gets the
            smallest, the least sensitive the largest. If bounds differ between layers it is the nearest allocation.
        least: b_min in entries per head, at least the floor; None is a tenth of the mean budget. A total that does not
            reach it everywhere is shared equally.

    Examples:
        >>> floors = np.zeros((2, 2), dtype=np.int64)
        >>> Proportional(least=4).allocate(np.array([3.0, 1.0]), 48, floors, floors + 100).tolist()
        [[16, 16], [8, 8]]
    """

    direction: Direction = "forward"
    least: int | None = None

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Allocate `total` entries by sensitivities [L] or [L, Hkv]: int64 [L, Hkv].

        Raises:
            UsageError: a signal is not finite or they have another shape; `total` is outside [sum of floors, sum of
                caps].
        """
        low, high = check_bounds(np.shape(floors), total, floors, caps)
        given = check_signals(signals, "sensitivities")
        minimum = round_half_up(total / low.size / 10) if self.least is None else self.least
        scale = np.abs(given).max(initial=0.0)
        size = np.abs(given / scale).mean() * scale if scale > 0 else 0.0  # the sum of huge values would overflow
        weights = np.maximum(given, 0.0) + (1e-12 + 1e-6 * size)
        forward = share_above(
            weights if given.ndim == 2 else weights[:, None], total, lift_floors(minimum, total, low, high), high
        )
        if self.direction == "forward":
            return forward
        return largest_remainder(_reverse_budgets(forward, given), total, low, high)


def _reverse_budgets(budgets: Ints, signals: Floats) -> Ints:
    """Permute budgets [L, Hkv], by layer or by head as the signals are, so that the largest signal gets the smallest.

    Among equal signals the one with the largest forward budget comes first, so odd entries change places, too.
    """
    rows = budgets.reshape(signals.size, -1)
    sums = rows.sum(axis=1)
    reversed_rows = np.empty_like(rows)
    reversed_rows[np.lexsort((-sums, -signals.ravel()))] = rows[np.argsort(sums, kind="stable")]
    return reversed_rows.reshape(budgets.shape)
