"""Tables of local eviction ratios: one per prompt, and their mean, which a profile holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import STABILITY_RATIOS
from kvsearch.core.arrays import Floats
from kvsearch.plan.profile_arrays import GRID_SIZE
from kvsearch.policies import Policy

CHECKED_RATIOS = (0.8, 0.9, 0.95)  # at which a table is compared with even budgets
HELD_OUT = "held_out_ratio"  # [FOLDS, len(CHECKED_RATIOS), L, Hkv]: tables of all contexts but those of a fold
FOLDS = 4
MIN_CONTEXTS_TO_JUDGE = 6  # of fewer, all agree by chance more often than one time in twenty (2 * 0.5**6 = 0.031)
CHECKED_ROWS = [round(100 * ratio) - 1 for ratio in CHECKED_RATIOS]
STABILITY_ROWS = [round(100 * ratio) - 1 for ratio in STABILITY_RATIOS]


def floor_entries(length: int, policy: Policy, minimum: float) -> int:
    """Return the entries that every head keeps: the protected ones, or the share `minimum` of the prompt."""
    return max(math.ceil(minimum * length - 1e-9), policy.protected(length), 1)


def sample_curves(curves: Floats, points: int) -> Floats:
    """Sample curves [..., T + 1] over budgets 0 ... T at `points` even positions, by linear interpolation."""
    position = np.linspace(0, curves.shape[-1] - 1, points)
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, curves.shape[-1] - 1)
    share = position - below
    read: Floats = (1 - share) * curves[..., below] + share * curves[..., above]
    return read


def assign_folds(data: CalibrationData) -> list[int]:
    """Assign a fold to every context, in turn; equal texts share a fold."""
    folds = {context: number % FOLDS for number, text in enumerate(data.by_text) for context in text}
    return [folds[context] for context in range(len(data.contexts))]


def has_enough_contexts(data: CalibrationData) -> bool:
    """Tell whether there are enough distinct contexts to judge a table."""
    return len(data.by_text) >= MIN_CONTEXTS_TO_JUDGE


class RatioTables:
    """The tables of all prompts; each is float32 [99, L, Hkv]."""

    def __init__(self, policy: Policy, minimum: float) -> None:
        self.policy = policy
        self.minimum = minimum
        self.lengths: list[int] = []
        self.contexts: list[int] = []
        self.tables: list[NDArray[np.float32]] = []

    def add(self, table: NDArray[np.float32], length: int, context: int) -> None:
        """Add the table of a prompt of `length` tokens."""
        self.tables.append(table)
        self.lengths.append(length)
        self.contexts.append(context)

    def floor(self, length: int) -> int:
        return floor_entries(length, self.policy, self.minimum)

    @property
    def length(self) -> int:
        return max(self.lengths)

    def held_out(
        self, folds: Sequence[int], table_of: Callable[[Sequence[int]], NDArray[np.float32]] | None = None
    ) -> NDArray[np.float32]:
        """Return the tables at `CHECKED_RATIOS` without the contexts of each fold, [FOLDS, R, L, Hkv].

        `folds` has that of every context, see `assign_folds`; `table_of` makes a table of some prompts (None: `mean`).
        """
        table_of = table_of or self.mean
        parts = [[n for n, context in enumerate(self.contexts) if folds[context] != fold] for fold in range(FOLDS)]
        return np.stack([table_of(part)[CHECKED_ROWS] for part in parts])

    def mean(self, some: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Average local ratios, float32 [99, L, Hkv]; each row over the prompts that can be cut that far.

        `some` are the numbers of prompts (None: all).
        """
        some = range(len(self.tables)) if some is None else some
        tables = np.stack([self.tables[number] for number in some])
        mean: Floats = np.einsum("mr,mrlh->rlh", self._weigh_prompts(some), tables)
        return mean.astype(np.float32)

    def deviation(self) -> NDArray[np.float32]:
        """Return the standard deviation of the local ratios over the same prompts, float32 [99, L, Hkv]."""
        apart = np.stack(self.tables).astype(np.float64) - self.mean()
        variance: Floats = np.einsum("mr,mrlh->rlh", self._weigh_prompts(range(len(apart))), apart**2)
        return np.sqrt(variance).astype(np.float32)

    def _weigh_prompts(self, numbers: Sequence[int]) -> Floats:
        """Return the weight of each prompt in each row, [M, 99]."""
        lengths = [self.lengths[number] for number in numbers]
        reach = np.array([1 - self.floor(length) / length for length in lengths])
        rows = np.arange(1, GRID_SIZE + 1) / (GRID_SIZE + 1)
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
