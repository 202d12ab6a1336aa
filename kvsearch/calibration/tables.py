"""Tables of local eviction ratios: one per prompt, and their mean, which a profile holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.arrays import Floats, Ints
from kvsearch.calibration.options import STABILITY_RATIOS
from kvsearch.plan import GRID
from kvsearch.policies import Policy

STABILITY_ROWS = [round(100 * ratio) - 1 for ratio in STABILITY_RATIOS]


def floor_entries(length: int, policy: Policy, minimum: float) -> int:
    """Return the entries every head keeps at least: the protected ones, or the share `minimum` of the prompt."""
    return max(math.ceil(minimum * length - 1e-9), policy.protected(length), 1)


def grid_totals(length: int, heads: int, floor: int) -> Ints:
    """Return the entries of all `heads` at the global eviction ratios 0.01 ... 0.99, halves upward, [99] int64.

    What would leave a head less than `floor` stays at that.
    """
    entries = length * heads
    totals: Ints = (2 * (100 - np.arange(1, GRID + 1, dtype=np.int64)) * entries + 100) // 200
    return np.maximum(totals, floor * heads)


class RatioTables:
    """The tables of all prompts; each is float32 [99, L, Hkv]."""

    def __init__(self, policy: Policy, minimum: float) -> None:
        self.policy, self.minimum = policy, minimum
        self.lengths: list[int] = []
        self.contexts: list[int] = []
        self.tables: list[NDArray[np.float32]] = []

    def add(self, table: NDArray[np.float32], length: int, context: int) -> None:
        """Take in a prompt of `length` tokens."""
        self.tables.append(table)
        self.lengths.append(length)
        self.contexts.append(context)

    def floor(self, length: int) -> int:
        return floor_entries(length, self.policy, self.minimum)

    @property
    def length(self) -> int:
        return max(self.lengths)

    def mean(self) -> NDArray[np.float32]:
        """Return mean local ratios, float32 [99, L, Hkv]; each row over the prompts that can be cut that far."""
        mean: Floats = np.einsum("mr,mrlh->rlh", self._shares(), np.stack(self.tables))
        return mean.astype(np.float32)

    def deviation(self) -> NDArray[np.float32]:
        """Return the standard deviation of the local ratios over the same prompts, float32 [99, L, Hkv]."""
        apart = np.stack(self.tables).astype(np.float64) - self.mean()
        variance: Floats = np.einsum("mr,mrlh->rlh", self._shares(), apart**2)
        return np.sqrt(variance).astype(np.float32)

    def _shares(self) -> Floats:
        """Return how much each prompt counts in each row, [M, 99]."""
        reach = np.array([1 - self.floor(length) / length for length in self.lengths])
        rows = np.arange(1, GRID + 1) / (GRID + 1)
        able = reach[:, None] >= np.minimum(rows, reach.max()) - 1e-9
        shares: Floats = able / able.sum(0)
        return shares

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the mean, and every prompt's ratios [M, 9, L, Hkv] at 0.1 ... 0.9 with the context it belongs to."""
        return {
            "evicted_ratio": self.mean(),
            "question_ratio": np.stack(self.tables)[:, STABILITY_ROWS],
            "question_context": np.array(self.contexts, dtype=np.int32),
        }
