"""What an allocator is, and allocators by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import UsageError
from kvsearch.naming import suggest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Signals = NDArray[np.floating[Any]]

BUILT_IN = {
    "adakv": "kvsearch.budgets.adakv:AdaKV",
    "cake": "kvsearch.budgets.cake:CAKE",
    "lava": "kvsearch.budgets.lava:LAVa",
    "marginal": "kvsearch.budgets.lukv:MarginalAllocator",
    "proportional": "kvsearch.budgets.polykv:Proportional",
    "pyramid": "kvsearch.budgets.pyramidkv:Pyramid",
    "uniform": "kvsearch.budgets.uniform:Uniform",
}


class Allocator(Protocol):
    """How much each kv head keeps."""

    @property
    def name(self) -> str:
        """The name it is registered under."""

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


def allocator_names() -> list[str]:
    """List all names `create_allocator` knows, sorted."""
    return sorted(BUILT_IN)


def create_allocator(name: str, params: Mapping[str, Any] | None = None) -> Allocator:
    """Build an allocator from its name and options; UsageError names what is unknown."""
    if name not in BUILT_IN:
        raise UsageError(f"unknown allocator {name!r}{suggest(name, allocator_names())}")
    module, _, attribute = BUILT_IN[name].partition(":")
    try:
        return cast(Allocator, getattr(import_module(module), attribute)(**(params or {})))
    except TypeError as error:
        raise UsageError(f"allocator {name}: {str(error).partition('() ')[2]}") from error
