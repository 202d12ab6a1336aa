"""Show perplexities: rows with intervals by a bootstrap over windows, a table for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.evaluation.perplexity import Perplexity, WindowLoss
from kvsearch.evaluation.statistics import LEVEL, RESAMPLES, Floats, Ints
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.methods import FULL

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
    """A row per method. Windows are resampled, the same ones for all methods."""
    by_method: dict[str, list[WindowLoss]] = {}
    for sample in result.samples:
        by_method.setdefault(sample.method, []).append(sample)
    nll = {method: np.array([sample.nll for sample in mine]) for method, mine in by_method.items()}
    draws = np.random.default_rng(result.seed).integers(0, result.windows, (RESAMPLES, result.windows))
    return [
        PerplexityRow(
            method,
            _estimate(nll[method], draws),
            None if method == FULL else _difference(nll[method] - nll[FULL], draws),
            *(fmean(getattr(sample, name) for sample in mine) for name in HELD),
        )
        for method, mine in by_method.items()
    ]


def perplexity_table(result: Perplexity, phases: str | None = None) -> Table:
    """A row per method with 95% intervals; `phases`, for the title, are those in which the methods evict."""
    from rich.box import SIMPLE
    from rich.table import Table

    what = f"{result.windows} windows of {result.context} + {result.continuation} tokens" + (
        f", phases: {phases}" if phases else ""
    )
    table = Table(title=f"{result.model}: perplexity of {result.text}, {what}, 95% interval", title_justify="left")
    table.box, table.caption, table.caption_justify = SIMPLE, "\n".join(_captions(result)), "left"
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    rows = perplexity_rows(result)
    for row in rows:
        table.add_row(row.method, *_losses(row), *_held(row, rows[0]))
    return table


def perplexity_json(result: Perplexity) -> dict[str, Any]:
    """Everything but the losses of single tokens."""
    settings = {name: value for name, value in asdict(result).items() if name != "samples"}
    methods = {row.method: _row_json(row) for row in perplexity_rows(result)}
    by_window = [{"method": sample.method, "start": sample.start, "nll": sample.nll} for sample in result.samples]
    return {**settings, "methods": methods, "by_window": by_window}


def _row_json(row: PerplexityRow) -> dict[str, Any]:
    return {
        "nll": asdict(row.nll),
        "perplexity": asdict(row.perplexity),
        "difference": None if row.difference is None else asdict(row.difference),
        "held": {name: getattr(row, name) for name in HELD},
    }


def _estimate(values: Floats, draws: Ints) -> Estimate:
    low, high = np.quantile(values[draws].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def _difference(values: Floats, draws: Ints) -> NllDifference:
    found, signs = _estimate(values, draws), np.sign(values)
    better, equal, worse = (int((signs == sign).sum()) for sign in (-1, 0, 1))
    return NllDifference(found.mean, found.low, found.high, better, equal, worse)


def _losses(row: PerplexityRow) -> tuple[str, str, str, str]:
    found = row.difference
    told = ("-", "-") if found is None else (_spread(found, "+.4f"), f"{found.better} / {found.equal} / {found.worse}")
    return (_spread(row.perplexity, ".3f"), _spread(row.nll, ".4f"), *told)


def _held(held: PerplexityRow, full: PerplexityRow) -> Sequence[str]:
    return (
        f"{held.entries:.0f}", f"{held.entries / full.entries:.3f}", f"{held.bytes / 1024:.1f}", f"{held.most:.0f}",
    )  # fmt: skip


def _spread(found: Estimate | NllDifference, form: str) -> str:
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _captions(result: Perplexity) -> list[str]:
    return [
        "entries and KiB: held once a context is compressed; most entries: at a time until its continuation ends",
        *result.notes,
    ]
