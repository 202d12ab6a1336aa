"""Perplexities, read again from what `evaluate --tasks ppl:FILE --json` printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from kvsearch.evaluation.window_loss import Perplexity
from kvsearch.report.files.stored import Stored, stored
from kvsearch.report.perplexity import HELD, NllDifference, PerplexityRow
from kvsearch.runs.estimates import Estimate

MOST_NATS = 700.0  # the exponential of more is no number


class _Method(Stored):
    nll: Estimate
    difference: NllDifference | None
    held: dict[str, float]

    @model_validator(mode="after")
    def _is_finite(self) -> Self:
        worst = max(self.nll.mean, self.nll.low, self.nll.high)
        if worst > MOST_NATS:
            raise ValueError(f"nll: {worst:g} nats per token are no loss")
        return self


class _Window(Stored):
    method: str


class _Measured(Stored):
    methods: dict[str, _Method]
    by_window: tuple[_Window, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if any(not one.held.get("entries", 0) > 0 for _, one in self.rows[:1]):
            raise ValueError("methods: the first one, the full cache, holds nothing")
        return self

    @property
    def rows(self) -> list[tuple[str, _Method]]:
        """Methods by name, in the order in which they were measured."""
        return [(name, self.methods[name]) for name in dict.fromkeys(one.method for one in self.by_window)
                if name in self.methods]  # fmt: skip


class _PerplexityFile(Stored):
    phases: str
    perplexity: dict[str, Any]


@dataclass(frozen=True)
class StoredPerplexity:
    """What was measured, without the losses of windows, a row per method, and the phases in which they evict."""

    result: Perplexity
    rows: tuple[PerplexityRow, ...]
    phases: str


def read_perplexity(data: Any, path: Path) -> StoredPerplexity:
    """Return what was measured; UsageError if the file at `path` is damaged."""
    found = stored(_PerplexityFile, data, path)
    measured = stored(_Measured, found.perplexity, path)
    rows = [
        PerplexityRow(name, one.nll, one.difference, *(one.held.get(what, 0.0) for what in HELD))
        for name, one in measured.rows
    ]
    return StoredPerplexity(stored(Perplexity, {**found.perplexity, "samples": []}, path), tuple(rows), found.phases)
