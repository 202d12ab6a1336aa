"""How numbers are printed: scores in percent, intervals, and how often one of two methods won."""

from __future__ import annotations

from typing import Protocol


class Interval(Protocol):
    """A mean between its ends."""

    @property
    def mean(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...


class Counts(Protocol):
    """On how many questions a method won, tied and lost."""

    @property
    def wins(self) -> int: ...

    @property
    def ties(self) -> int: ...

    @property
    def losses(self) -> int: ...


def percent(share: float, digits: int = 2) -> str:
    """Write a share as percent, without the sign."""
    return f"{100 * share:.{digits}f}"


def chance_of(share: float) -> str:
    """Write how likely chance alone is, in three digits; a sampled test never shows that it is none."""
    return "<0.001" if share < 0.0005 else f"{share:.3f}"


def bounds(found: Interval, form: str = ".2f", unit: float = 100) -> str:
    """Write the ends of an interval in a format, times `unit`: [low, high]."""
    return f"[{unit * found.low:{form}}, {unit * found.high:{form}}]"


def interval(found: Interval, form: str = ".2f", unit: float = 100, noun: str = "") -> str:
    """Write a mean with its interval in a format, times `unit`; a noun such as " points" goes between the two."""
    return f"{unit * found.mean:{form}}{noun} {bounds(found, form, unit)}"


def outcomes(found: Counts) -> str:
    """Write how many questions were won, tied and lost."""
    return f"{found.wins} / {found.ties} / {found.losses}"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s unless the number is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def or_dash(value: float | None, form: str) -> str:
    """Write a number in a format, None and NaN as a dash."""
    return "-" if value is None or value != value else f"{value:{form}}"
