"""The Allocator interface: signals and a total become budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.plan.rounding import water_fill

Signals = NDArray[np.floating[Any]]


class Allocator(Protocol):
    """How much each kv head keeps."""

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


def lift_floors(minimum: int, total: int, floors: Ints, caps: Ints) -> Ints:
    """Raise floors to `minimum` entries where the caps permit; if `total` does not reach that far, as evenly as it can.

    Returns int64 [L, Hkv] between `floors` and `caps`, with a sum of at most `total`.
    """
    lifted = np.clip(minimum, floors, caps)
    return lifted if lifted.sum() <= total else water_fill(np.ones(lifted.shape), total, floors, lifted)


def share_above(weights: ArrayLike, total: int, floors: Ints, caps: Ints) -> Ints:
    """Grant the floors and share the rest in proportion: floors + clamp(lam * weights, 0, caps - floors), rounded.

    `weights` >= 0 broadcast to [L, Hkv]; a layer of equal heads gets equal budgets, but for the odd entries, which go
    to its first heads. Zero weights get nothing until all others are full; all zero means equal shares.
    """
    room = caps - floors
    return floors + water_fill(np.broadcast_to(np.asarray(weights), room.shape), total - int(floors.sum()), 0, room)


def check_at_least(minimum: int, /, **options: int | None) -> None:
    """Raise UsageError that names the first of the `options` below `minimum`; an option that is None was not given."""
    for name, value in options.items():
        if value is not None and value < minimum:
            raise UsageError(f"{name.replace('_', ' ')} must be {minimum} or more, got {value}")


def check_signals(signals: ArrayLike, noun: str, minimum: float = -np.inf) -> Floats:
    """Return signals as float64; UsageError names the first value that is not finite or below `minimum`."""
    values = np.asarray(signals, dtype=np.float64)
    wrong = np.argwhere(~(np.isfinite(values) & (values >= minimum)))
    if wrong.size:
        at = tuple(wrong[0].tolist())
        rule = "finite" if np.isneginf(minimum) else f"finite and >= {minimum:g}"
        raise UsageError(f"{noun} must be {rule}, got {values[at]} at {list(at)}")
    return values


@dataclass(frozen=True)
class Uniform:
    """The same budget for every kv head, as far as the bounds allow; odd entries go to the first heads.

    Examples:
        >>> floors = np.zeros((2, 3), dtype=np.int64)
        >>> Uniform().allocate(np.zeros(0), 20, floors, floors + 100).tolist()
        [[4, 4, 3], [3, 3, 3]]
    """

    name: ClassVar[str] = "uniform"

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:  # noqa: ARG002
        """Share `total` equally over the [L, Hkv] heads of `floors`; the signals are not read.

        Raises:
            UsageError: `total` is outside [sum of floors, sum of caps].
        """
        return water_fill(np.ones(np.shape(floors)), total, floors, caps)
