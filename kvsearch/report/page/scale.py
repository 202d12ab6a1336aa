"""From values to places on an axis, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST, WIDEST = 1e-300, 1e15  # of logarithmic axes: values above, and their range below
MOST_POWERS = 7
FEW = 6  # different values that get a tick each
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` at places from `start` to `end`, by their logarithms if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        low, high, at = (math.log(one) for one in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value,
        )  # fmt: skip
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def fitted(values: Iterable[float], start: float, end: float, *, log: bool = False, margin: float = 0.06) -> Scale:
    """Return a scale that holds all finite values, with a margin (a share of their range) at both ends.

    It is linear after all if a value is not above zero, or values are further apart than any axis shows.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if log and low > LEAST and high / low < WIDEST:
        room = (high / low) ** margin if high > low else 1.5
        return Scale(low / room, high * room, start, end, True)
    room = margin * (high - low) if high > low else max(abs(low), 1.0) * 0.1
    return Scale(low - room, high + room, start, end)


def ticks(scale: Scale, most: int = 5) -> list[float]:
    """Return round values within a scale, about `most` of them; powers of ten, with 2 and 5 where there are few."""
    return _log_ticks(scale) if scale.log else _linear_ticks(scale.low, scale.high, most)


def ticks_at(values: Iterable[float], scale: Scale, apart: float) -> list[float]:
    """Return the values themselves where there are few and their labels do not meet, else round ones.

    `apart` is how far two labels must be from each other.
    """
    known = sorted({value for value in values if math.isfinite(value)})
    near = any(abs(scale(two) - scale(one)) < apart for one, two in pairwise(known))
    return ticks(scale) if len(known) > FEW or near or not known else known


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in STEPS if power * one >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(scale: Scale) -> list[float]:
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for leading in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        found = [lead * 10.0**power for power in range(first, last + 1) for lead in leading]
        inside = [value for value in found if scale.low <= value <= scale.high]
        if len(inside) >= 3:
            return inside[:: -(-len(inside) // MOST_POWERS)] if leading == (1,) else inside
    return _linear_ticks(scale.low, scale.high, 4)


def label(value: float) -> str:
    """Return a tick's label: at most four digits that say something, thousands as k."""
    if value and abs(value) >= 10_000 and math.isfinite(value):
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}".replace("-", "−")


def every(count: int, room: float, least: float) -> Sequence[int]:
    """Return which of `count` labels `room` apart are written so that they are at least `least` apart."""
    step = next((one for one in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50) if one * room >= least), max(count, 1))
    return range(0, count, step)
