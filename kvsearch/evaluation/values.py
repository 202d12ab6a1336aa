"""What evaluations measure, as results record it: what a cache held, and what layers and windows lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Footprint(NamedTuple):
    """Entries and bytes once context or prompt were compressed, the most entries until the reply was complete."""

    entries: float
    bytes: float
    most: float


@dataclass(frozen=True)
class LayerLoss:
    """What the output of a layer loses under a method, means over the `queries` of a task.

    The bounds are None where entries are merged: they hold for keys and values that stay as they are.
    """

    task: str
    method: str
    layer: int
    queries: int
    loss: float  # |y - yhat|_1
    evicted_mass: float  # attention on entries that are gone, mean over the query heads
    bound: float | None  # 2 C sum_h Vmax_h m_h
    bound_by_head: float | None  # 2 sum_h C_h Vmax_h m_h

    @property
    def ratio(self) -> float | None:
        """The loss in parts of its bound; None without a bound, or where it is 0."""
        return self.loss / self.bound if self.bound else None


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
class MeasuredText:
    """Windows of a text on which several methods were measured.

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


@dataclass(frozen=True)
class Perplexity(MeasuredText):
    """Losses of several methods, the full cache first, on the same windows of a text, in its order."""

    samples: list[WindowLoss]
