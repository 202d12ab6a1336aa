"""The result of `evaluate --tasks ppl:FILE`: what methods lose on windows of a text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from kvsearch.evaluation.samples import Footprint, MeasuredText, Perplexity, WindowLoss
from kvsearch.evaluation.statistics import student_estimate
from kvsearch.results.base import Result, Stored
from kvsearch.results.evaluation import HeldField
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import FULL


@dataclass(frozen=True)
class NllDifference(Estimate):
    """How much more a method loses per token than the full cache, in nats: the mean paired difference, 95% interval.

    It is better (loses less), equal or worse on so many windows.
    """

    better: int
    equal: int
    worse: int


class MethodPerplexity(Stored):
    """One method: its loss per token in nats, how that differs from the full cache's (None for that itself).

    What it held are means over the windows; see `WindowLoss`.
    """

    nll: Estimate
    perplexity: Estimate
    difference: NllDifference | None
    held: HeldField


class WindowNll(Stored):
    """What a method loses per token of one window, which starts at so many tokens of the text."""

    method: str
    start: int
    nll: float


@dataclass(frozen=True)
class TextPerplexity(MeasuredText):
    """Losses of several methods, the full cache first, on the same windows of a text."""

    methods: dict[str, MethodPerplexity]
    by_window: tuple[WindowNll, ...]

    @classmethod
    def of(cls, found: Perplexity) -> TextPerplexity:
        """Return everything but the losses of single tokens."""
        settings = {one.name: getattr(found, one.name) for one in fields(MeasuredText)}
        windows = [WindowNll(method=one.method, start=one.start, nll=one.nll) for one in found.samples]
        return cls(**settings, methods=_methods(found), by_window=tuple(windows))

    @property
    def rows(self) -> list[tuple[str, MethodPerplexity]]:
        """Methods by name, in the order in which they were measured."""
        names = dict.fromkeys(window.method for window in self.by_window)
        return [(name, self.methods[name]) for name in names if name in self.methods]

    @property
    def notes(self) -> list[str]:
        """What to know before the numbers are trusted."""
        notes = []
        if self.wanted is not None and self.windows < self.wanted:
            notes.append(f"{self.wanted} windows were asked for, {self.text} has {self.windows}")
        return notes


class PerplexityResult(Result):
    """What was measured, and the phases in which the methods evict."""

    SCHEMA: ClassVar[str] = "kvsearch.perplexity/1"

    phases: str
    batch: int | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    perplexity: TextPerplexity


def _methods(found: Perplexity) -> dict[str, MethodPerplexity]:
    """Return what every method loses."""
    by_method: dict[str, list[WindowLoss]] = {}
    for sample in found.samples:
        by_method.setdefault(sample.method, []).append(sample)
    nll = {method: np.array([sample.nll for sample in mine]) for method, mine in by_method.items()}
    minus_full = {method: values - nll[FULL] for method, values in nll.items()}
    losses = {method: student_estimate(values) for method, values in nll.items()}
    differences: dict[str, NllDifference | None] = {}
    for method, values in minus_full.items():
        signs = np.sign(values)
        better, equal, worse = (int((signs == sign).sum()) for sign in (-1, 0, 1))
        differences[method] = NllDifference(**asdict(student_estimate(values)), better=better, equal=equal, worse=worse)
    differences[FULL] = None
    return {
        method: MethodPerplexity(
            nll=losses[method],
            perplexity=Estimate(
                *(math.exp(getattr(losses[method], name)) for name in ("mean", "low", "high")),
                contexts=losses[method].contexts,
            ),
            difference=differences[method],
            held=Footprint(*(fmean(getattr(one, name) for one in by_method[method]) for name in Footprint._fields)),
        )
        for method in by_method
    }
