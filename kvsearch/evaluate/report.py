"""Show an evaluation: tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.evaluate.statistics import Estimate, Row
from kvsearch.evaluate.study import PROTOCOL, Study
from kvsearch.plan.files import atomic_write

CAPTION = "uniform: the plan's own policy with even budgets; all methods but full hold the plan's number of entries"

if TYPE_CHECKING:
    from rich.table import Table


def score_table(study: Study) -> Iterator[Table]:
    """Scores per task with 95% intervals, the plan's paired differences, and what each method holds."""
    methods = study.methods
    scores = _scores(f"{study.model}: score, 95% interval ({PROTOCOL})", methods, study.rows)
    scores.caption, scores.caption_justify = CAPTION, "left"
    yield scores
    others = [method for method in methods if method != study.subject]
    title = f"{study.subject} minus the others: paired difference, 95% interval"
    yield _differences(title, others, study.rows)
    yield _held(study)


def plain_scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    """Mean scores only."""
    table = _table(title, ["task", "questions", *methods])
    for row in rows:
        table.add_row(row.task, str(row.questions), *(f"{row.scores[m].mean:.2f}" for m in methods))
    return table


def as_json(study: Study) -> dict[str, Any]:
    """The whole evaluation but for the single replies."""
    return {
        "model": study.model, "protocol": PROTOCOL, "seed": study.seed, "subject": study.subject,
        "held": {method: study.held(method)._asdict() for method in study.methods},
        "tasks": [asdict(row) for row in study.rows],
    }  # fmt: skip


def write_samples(study: Study, path: Path) -> None:
    """Write every reply to a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(study.samples[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(sample) for sample in study.samples)
    atomic_write(path, text.getvalue().encode())


def _scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    table = _table(title, ["task", "questions", *methods])
    for row in rows:
        table.add_row(row.task, str(row.questions), *(_spread(row.scores[m]) for m in methods), style=_style(row, rows))
    return table


def _differences(title: str, others: Sequence[str], rows: Sequence[Row]) -> Table:
    table = _table(title, ["task", *others])
    for row in rows:
        table.add_row(row.task, *(_spread(row.differences[m], sign="+") for m in others), style=_style(row, rows))
    return table


def _held(study: Study) -> Table:
    columns = ["method", "entries", "share", "KiB", "share", "most entries while answering"]
    table = _table("held after the context, mean", columns)
    full = study.held(study.methods[0])
    for method in study.methods:
        held = study.held(method)
        table.add_row(
            method, f"{held.entries:.0f}", f"{held.entries / full.entries:.3f}", f"{held.bytes / 1024:.1f}",
            f"{held.bytes / full.bytes:.3f}", f"{held.most:.0f}",
        )  # fmt: skip
    return table


def _spread(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.mean:{sign}.2f} [{estimate.low:{sign}.2f}, {estimate.high:{sign}.2f}]"


def _style(row: Row, rows: Sequence[Row]) -> str | None:
    return "bold" if len(rows) > 1 and row is rows[-1] else None


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
