"""Show perplexities: rows with intervals by a bootstrap over windows, a table for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.evaluation.statistics import interval_of, resampled_means
from kvsearch.evaluation.window_loss import Perplexity, WindowLoss
from kvsearch.report.numbers import interval
from kvsearch.report.screen import screen_table
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import FULL

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "kvsearch.perplexity/1"
COLUMNS = (
    "method", "perplexity", "nats per token", "minus full", "better / equal / worse windows", "entries", "share", "KiB",
    "most entries",
)  # fmt: skip
HELD = ("entries", "bytes", "most")


@dataclass(frozen=True)
class NllDifference:
    """How much more a method loses per token than the full cache, in nats: the mean paired difference, 95% interval.

    It is better (loses less), equal or worse on so many windows.
    """

    mean: float
    low: float
    high: float
    better: int
    equal: int
    worse: int


@dataclass(frozen=True)
class PerplexityRow:
    """One method: its loss per token in nats, how that differs from the full cache's (None for that itself).

    What it held are means over the windows; see `WindowLoss`.
    """

    method: str
    nll: Estimate
    difference: NllDifference | None
    entries: float
    bytes: float
    most: float

    @property
    def perplexity(self) -> Estimate:
        """The exponential of the mean loss over all tokens of all windows."""
        return Estimate(math.exp(self.nll.mean), math.exp(self.nll.low), math.exp(self.nll.high))


def perplexity_rows(result: Perplexity) -> list[PerplexityRow]:
    """Return a row per method. Windows are resampled, the same ones for all methods."""
    by_method: dict[str, list[WindowLoss]] = {}
    for sample in result.samples:
        by_method.setdefault(sample.method, []).append(sample)
    nll = {method: np.array([sample.nll for sample in mine]) for method, mine in by_method.items()}
    minus_full = {method: values - nll[FULL] for method, values in nll.items()}
    rng, ones = np.random.default_rng(result.seed), np.ones(result.windows)
    spread = iter(resampled_means(rng, [*nll.values(), *minus_full.values()], ones))
    losses = {method: Estimate(float(nll[method].mean()), *interval_of(next(spread))) for method in nll}
    differences: dict[str, NllDifference | None] = {}
    for method, values in minus_full.items():
        signs = np.sign(values)
        counts = (int((signs == sign).sum()) for sign in (-1, 0, 1))
        differences[method] = NllDifference(float(values.mean()), *interval_of(next(spread)), *counts)
    differences[FULL] = None
    return [
        PerplexityRow(
            method, losses[method], differences[method],
            *(fmean(getattr(sample, name) for sample in mine) for name in HELD),
        )
        for method, mine in by_method.items()
    ]  # fmt: skip


def perplexity_table(result: Perplexity, rows: Sequence[PerplexityRow], phases: str | None = None) -> Table:
    """Return a row per method with 95% intervals; `phases`, for the title, are those in which the methods evict."""
    what = f"{result.windows} windows of {result.context} + {result.continuation} tokens" + (
        f", phases: {phases}" if phases else ""
    )
    notes = [
        "entries and KiB: held once a context is compressed; most entries: at a time until its continuation ends",
        *result.notes,
    ]
    title = f"{result.model}: perplexity of {result.text}, {what}, 95% interval"
    table = screen_table(title, COLUMNS, left=COLUMNS[:1], caption="\n".join(notes), caption_justify="left")
    for row in rows:
        found, full = row.difference, rows[0]
        lost = ("-", "-")
        if found is not None:
            lost = interval(found, "+.4f", unit=1), f"{found.better} / {found.equal} / {found.worse}"
        table.add_row(
            row.method, interval(row.perplexity, ".3f", unit=1), interval(row.nll, ".4f", unit=1), *lost,
            f"{row.entries:.0f}", f"{row.entries / full.entries:.3f}", f"{row.bytes / 1024:.1f}", f"{row.most:.0f}",
        )  # fmt: skip
    return table


def perplexity_json(result: Perplexity) -> dict[str, Any]:
    """Return everything but the losses of single tokens."""
    settings = {name: value for name, value in asdict(result).items() if name != "samples"}
    methods = {
        row.method: {
            "nll": asdict(row.nll),
            "perplexity": asdict(row.perplexity),
            "difference": None if row.difference is None else asdict(row.difference),
            "held": {name: getattr(row, name) for name in HELD},
        }
        for row in perplexity_rows(result)
    }
    by_window = [{"method": sample.method, "start": sample.start, "nll": sample.nll} for sample in result.samples]
    return {**settings, "methods": methods, "by_window": by_window}
