"""Show an evaluation: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvsearch.evaluate.protocol import QUESTION_AGNOSTIC
from kvsearch.evaluate.statistics import Difference, Estimate, Row
from kvsearch.evaluate.study import Study

if TYPE_CHECKING:
    from rich.table import Table


def score_table(study: Study) -> Iterator[Table]:
    """Scores per task with 95% intervals, the subject's paired differences, and what each method holds."""
    methods = study.methods
    scores = _scores(f"{study.model}: score, 95% interval ({study.protocol})", methods, study.rows)
    scores.caption, scores.caption_justify = "\n".join([_explained(study), *study.notes]), "left"
    yield scores
    others = [method for method in methods if method != study.subject]
    title = f"{study.subject} minus the others: paired difference, 95% interval; questions won / tied / lost"
    yield _differences(f"{title} ({study.protocol})", others, study.rows)
    yield _held(study)


def _explained(study: Study) -> str:
    uniform = f"uniform: the policy of {study.subject} with even budgets; " if "uniform" in study.methods else ""
    return f"{uniform}all methods but full hold as many entries as the plan"


def plain_scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    """Mean scores only."""
    table = _table(title, ["task", "questions", *methods])
    for row in rows:
        table.add_row(_label(row), str(row.questions), *(f"{row.scores[m].mean:.2f}" for m in methods))
    return table


def as_json(study: Study) -> dict[str, Any]:
    """The whole evaluation but for the single replies and what depends on the machine's speed.

    Per task, category and average: scores per method and, per plan, its paired differences to every other method.
    """
    return {
        "model": study.model, "protocol": study.protocol, "seed": study.seed, "subject": study.subject,
        "most_tokens": study.most_tokens,
        "held": {method: study.held(method)._asdict() for method in study.methods},
        "tasks": [_row_json(study, number) for number in range(len(study.rows))],
    }  # fmt: skip


def _row_json(study: Study, number: int) -> dict[str, Any]:
    row = study.rows[number]
    differences = {
        plan: {method: asdict(found) for method, found in rows[number].differences.items()}
        for plan, rows in study.summaries.items()
    }
    # task rows come first, in the order of the coverage
    covered = asdict(study.coverage[number]) if row.kind == "task" else {}
    return {**covered, **asdict(row), "differences": differences}


def _scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    table = _table(title, ["task", "questions", *methods])
    for row in rows:
        table.add_row(_label(row), str(row.questions), *(_spread(row.scores[m]) for m in methods), style=_style(row))
    return table


def _differences(title: str, others: Sequence[str], rows: Sequence[Row]) -> Table:
    table = _table(title, ["task", *others])
    for row in rows:
        cells = [_difference(row.differences[m]) for m in others]
        table.add_row(_label(row), *cells, style=_style(row))
    return table


def _held(study: Study) -> Table:
    columns = ["method", "entries", "share", "KiB", "share", "most entries while answering"]
    what = "context" if study.protocol == QUESTION_AGNOSTIC else "prompt"
    table = _table(f"held after the {what}, mean ({study.protocol})", columns)
    full = study.held(study.methods[0])
    for method in study.methods:
        held = study.held(method)
        table.add_row(
            method, f"{held.entries:.0f}", f"{held.entries / full.entries:.3f}", f"{held.bytes / 1024:.1f}",
            f"{held.bytes / full.bytes:.3f}", f"{held.most:.0f}",
        )  # fmt: skip
    return table


def _spread(estimate: Estimate | Difference, sign: str = "") -> str:
    return f"{estimate.mean:{sign}.2f} [{estimate.low:{sign}.2f}, {estimate.high:{sign}.2f}]"


def _difference(found: Difference) -> str:
    return f"{_spread(found, sign='+')}\n{found.wins} / {found.ties} / {found.losses}"


def _label(row: Row) -> str:
    return f"{row.task} (mean)" if row.kind == "category" else row.task


def _style(row: Row) -> str | None:
    return None if row.kind == "task" else "bold"


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
