"""What an allocator is: signals and a total become budgets."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsearch.arrays import Ints

Signals = NDArray[np.floating[Any]]


class Allocator(Protocol):
    """How much each kv head keeps."""

    @property
    def name(self) -> str:
        """The name that plans and reports call it by."""

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Turn signals into budgets in entries per kv head that sum to `total` exactly.

        Args:
            signals: what calibration measured; each allocator states the shape it reads.
            total: entries of all heads and layers together, protected entries included.
            floors: least entries per head, int64 [L, Hkv].
            caps: most entries per head, int64 [L, Hkv].

        Returns:
            int64 [L, Hkv] with floors <= budgets <= caps.

        Raises:
            UsageError: `total` is outside [sum of floors, sum of caps], or the signals are unusable.
        """
