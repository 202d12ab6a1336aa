"""Perplexities, read again from what `evaluate --tasks ppl:FILE --json` printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsearch.evaluation.window_loss import Perplexity
from kvsearch.report.files.stored import Stored, stored
from kvsearch.report.perplexity import HELD, NllDifference, PerplexityRow
from kvsearch.runs.estimates import Estimate


class _Method(Stored):
    nll: Estimate
    difference: NllDifference | None
    held: dict[str, float]


class _Window(Stored):
    method: str


class _Measured(Stored):
    methods: dict[str, _Method]
    by_window: tuple[_Window, ...]


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
    names = [name for name in dict.fromkeys(one.method for one in measured.by_window) if name in measured.methods]
    rows = [
        PerplexityRow(name, one.nll, one.difference, *(one.held.get(what, 0.0) for what in HELD))
        for name, one in ((name, measured.methods[name]) for name in names)
    ]
    return StoredPerplexity(stored(Perplexity, {**found.perplexity, "samples": []}, path), tuple(rows), found.phases)
