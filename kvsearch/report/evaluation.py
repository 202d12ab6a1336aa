"""Show an evaluation: JSON for programs, and the plain table of `kvsearch headroom`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvsearch.evaluation.averages import SizeBlock
from kvsearch.evaluation.compare import Comparison
from kvsearch.evaluation.grid import grids_json, needle_grids
from kvsearch.evaluation.losses import LayerLoss
from kvsearch.evaluation.statistics import Row
from kvsearch.report.losses import losses_json
from kvsearch.strategies.methods import FULL

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "kvsearch.evaluation/1"
SECTIONS = {"task": "tasks", "category": "categories", "average": "averages"}


def as_json(result: Comparison, losses: Sequence[LayerLoss] | None = None) -> dict[str, Any]:
    """The whole evaluation but for the single replies and what depends on the machine's speed.

    Scores are in [0, 1], differences are a method minus the subject. docs/evaluation.md describes every field.
    """
    first = result.blocks[0]
    told: dict[str, Any] = {
        "schema": SCHEMA, "model": result.model, **asdict(result.settings), "subject": result.subject,
        "phases": result.phases, "environment": dict(result.environment), "most_tokens": result.most_tokens,
        "tasks": [{**asdict(covered), "metric": result.metrics[covered.task]} for covered in result.coverage],
        "averages": {name: list(tasks) for name, tasks in result.averages.items()},
        "full": {"held": result.held[FULL]._asdict(), "scores": _scores(first.rows, FULL)},
        "blocks": [_block(result, block) for block in result.blocks],
        "notes": result.notes,
    }  # fmt: skip
    grids = needle_grids(result.samples)
    if grids:
        told["needle"] = grids_json(grids)
    if losses is not None:
        told["losses"] = losses_json(losses)
    return told


def plain_scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    """Mean scores only."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("task", "questions", *methods):
        table.add_column(column, justify="left" if column == "task" else "right")
    for row in rows:
        label = f"{row.task} (mean)" if row.kind == "category" else row.task
        table.add_row(label, str(row.questions), *(f"{row.scores[m].mean:.2f}" for m in methods))
    return table


def _block(result: Comparison, block: SizeBlock) -> dict[str, Any]:
    by_label = {contender.label: contender for contender in result.contenders}
    full = None if block.subject == FULL else _differences(block, FULL)
    return {
        "size": None if block.size is None else block.size.as_json(),
        "methods": [
            {
                "name": name, "label": label, "definition": by_label[label].definition,
                "phases": by_label[label].phases, "held": result.held[label]._asdict(),
                "scores": _scores(block.rows, label),
                "differences": None if label == block.subject else _differences(block, label),
            }
            for name, label in block.methods.items()
        ],
        "full_differences": full,
    }  # fmt: skip


def _scores(rows: Iterable[Row], label: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
    for row in rows:
        found[SECTIONS[row.kind]][row.task] = asdict(row.scores[label])
    return found


def _differences(block: SizeBlock, label: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
    for row in block.rows:
        found[SECTIONS[row.kind]][row.task] = asdict(block.difference(row, label))
    return found
