"""Means of scored replies, by what their keys say."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

Label = TypeVar("Label", bound=Hashable)


class Scored(Protocol):
    """A reply that has been scored; `key` is that of its example."""

    @property
    def key(self) -> str: ...

    @property
    def score(self) -> float: ...


def mean_by(samples: Iterable[Scored], label: Callable[[Scored], Label]) -> dict[Label, float]:
    """Return the mean score of the samples with the same label, in the order of the labels' first appearance."""
    scores: dict[Label, list[float]] = {}
    for sample in samples:
        scores.setdefault(label(sample), []).append(sample.score)
    return {name: math.fsum(values) / len(values) for name, values in scores.items()}
