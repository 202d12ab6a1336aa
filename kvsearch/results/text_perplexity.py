"""The result of `evaluate --tasks ppl:FILE`: what methods lose on windows of a text."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from kvsearch.evaluation.samples import Footprint, Perplexity
from kvsearch.evaluation.statistics import student_estimate
from kvsearch.results.base import Result, Stored
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import FULL


class MethodPerplexity(Stored):
    """One method: its loss per token in nats, in the mean and of every window, and what it held, means over windows.

    `difference` is what it loses more than the full cache, `better`, `equal` and `worse` count the windows on which it
    loses less, as much and more; None for the full cache itself.
    """

    name: str
    nll: Estimate
    perplexity: Estimate
    difference: Estimate | None = None
    better: int | None = None
    equal: int | None = None
    worse: int | None = None
    held: Footprint
    by_window: tuple[float, ...]


class PerplexityResult(Result):
    """Losses of several methods, the full cache first, on the same windows of a text; see `Perplexity`.

    `phases` are those in which the methods evict; `starts` are the places of windows in the text, in tokens.
    """

    SCHEMA: ClassVar[str] = "kvsearch.perplexity/2"

    model: str
    text: str
    context: int
    continuation: int
    stride: int
    wanted: int | None
    windows: int
    seed: int
    phases: str
    batch: int | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    starts: tuple[int, ...]
    methods: tuple[MethodPerplexity, ...] = Field(min_length=1)

    @classmethod
    def of(cls, found: Perplexity, **more: Any) -> Self:
        """Return everything but the losses of single tokens; `more` are the other fields."""
        names = list(dict.fromkeys(sample.method for sample in found.samples))
        measured = {name: [sample for sample in found.samples if sample.method == name] for name in names}
        full = np.array([sample.nll for sample in measured[FULL]])
        methods = []
        for name, samples in measured.items():
            nll = np.array([sample.nll for sample in samples])
            mean = student_estimate(nll)
            ends = (math.exp(end) for end in (mean.mean, mean.low, mean.high))
            lost: dict[str, Any] = {}
            if name != FULL:
                minus_full = nll - full
                counts = {"better": minus_full < 0, "equal": minus_full == 0, "worse": minus_full > 0}
                lost = {word: int(windows.sum()) for word, windows in counts.items()}
                lost["difference"] = student_estimate(minus_full)
            held = (fmean(getattr(sample, field) for sample in samples) for field in ("entries", "bytes", "most"))
            method = MethodPerplexity(
                name=name, nll=mean, perplexity=Estimate(*ends, contexts=mean.contexts), held=Footprint(*held),
                by_window=tuple(nll.tolist()), **lost,
            )  # fmt: skip
            methods.append(method)
        settings = {name: value for name, value in vars(found).items() if name != "samples"}
        starts = tuple(sample.start for sample in measured[FULL])
        return cls(**settings, starts=starts, methods=tuple(methods), **more)

    @property
    def notes(self) -> list[str]:
        """What to know before the numbers are trusted."""
        if self.wanted is None or self.windows >= self.wanted:
            return []
        return [f"{self.wanted} windows were asked for, {self.text} has {self.windows}"]
