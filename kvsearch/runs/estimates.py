"""Means and paired differences with their intervals, as results record them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Strict

Number = Annotated[float, Strict()]  # in a file no text stands for one, such as "nan"
LEAST_USEFUL = 0.1  # a full cache that scores less cannot tell methods apart


def doubt_of(full: float) -> str | None:
    """Return why scores beside those of a full cache with the mean `full` say next to nothing; None if they may."""
    if full >= LEAST_USEFUL:
        return None
    return (
        f"the full cache itself scores {full:.2f}: these questions cannot tell methods apart on this model, ask others "
        "with --tasks"
    )


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval."""

    mean: Number
    low: Number
    high: Number


@dataclass(frozen=True)
class Difference:
    """A mean paired difference, its 95% interval, and on how many questions it is above, at and below zero."""

    mean: Number
    low: Number
    high: Number
    wins: int
    ties: int
    losses: int
