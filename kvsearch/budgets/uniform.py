"""Uniform budgets: the baseline every other allocator is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.budgets.allocator import Signals
from kvsearch.plan.rounding import water_fill


@dataclass(frozen=True)
class Uniform:
    """The same budget for every kv head, as far as the bounds allow; odd entries go to the first heads."""

    name: ClassVar[str] = "uniform"

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:  # noqa: ARG002
        """Share `total` equally over the [L, Hkv] heads of `floors`; the signals are not read.

        Raises:
            UsageError: `total` is outside [sum of floors, sum of caps].
        """
        return water_fill(np.ones(np.shape(floors)), total, floors, caps)
