"""Perplexity as it was measured: what methods lose on windows of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WindowLoss:
    """What one method loses on one window, and what its cache takes.

    `losses` are nats per token of the continuation, `start` is the place of the context in the text, in tokens.
    `entries` and `bytes` are held once the context is compressed, `most` is the most entries held at a time until the
    last token of the continuation.
    """

    method: str
    start: int
    losses: tuple[float, ...]
    entries: int
    bytes: float
    most: int

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return math.fsum(self.losses) / len(self.losses)


@dataclass(frozen=True)
class Perplexity:
    """Losses of several methods, the full cache first, on the same windows of a text, in its order.

    Lengths and `stride` are in tokens, special ones not counted; `wanted` is how many windows were asked for (None:
    all), `windows` how many there are.
    """

    model: str
    text: str
    context: int
    continuation: int
    stride: int
    wanted: int | None
    windows: int
    seed: int
    samples: list[WindowLoss]

    @property
    def notes(self) -> list[str]:
        """What to know before the numbers are trusted."""
        notes = []
        if self.wanted is not None and self.windows < self.wanted:
            notes.append(f"{self.wanted} windows were asked for, {self.text} has {self.windows}")
        if self.windows == 1:
            notes.append("one window: the intervals have no width because there is nothing to resample")
        return notes
