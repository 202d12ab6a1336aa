"""Show layer attention output losses: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvsearch.evaluation.layer_loss import LayerLoss
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.report.numbers import or_dash
from kvsearch.report.screen import screen_table

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("layer", "method", "output loss", "bound", "bound by head", "loss / bound", "evicted mass")


def losses_json(losses: Sequence[LayerLoss]) -> list[dict[str, Any]]:
    """Return a record per task, layer and method."""
    return [{**asdict(row), "ratio": row.ratio} for row in losses]


def losses_table(model: str, protocol: Protocol, losses: Sequence[LayerLoss]) -> Table:
    """Return losses per layer and method, plain means over the tasks."""
    follows = "question and answer" if protocol == QUESTION_AGNOSTIC else "the answer"
    tasks = len({row.task for row in losses})
    notes = [
        f"mean over the tokens of {follows}, teacher-forced with every other layer undisturbed"
        + (f"; then over {tasks} tasks" if tasks > 1 else ""),
        "bound: 2 C times the sum over query heads of evicted mass times largest |v|_1; by head: each with its own C",
        "layers differ in scale: losses of different layers do not add up",
    ]
    if any(row.bound is None for row in losses):
        notes.append("no bound: the method merges entries, the bound is about keys and values that stay as they are")
    title = f"{model}: layer attention output loss, L1 ({protocol})"
    table = screen_table(title, COLUMNS, left=["method"], caption="\n".join(notes), caption_justify="left")
    rows = task_means(losses)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            str(row.layer), row.method, f"{row.loss:.4g}", or_dash(row.bound, ".4g"),
            or_dash(row.bound_by_head, ".4g"), or_dash(row.ratio, ".3f"), f"{row.evicted_mass:.4f}",
            end_section=following is not None and following.layer != row.layer,
        )  # fmt: skip
    return table


def task_means(losses: Sequence[LayerLoss]) -> list[LayerLoss]:
    """Join the rows of each layer and method to one, in which every task has the same weight; layers ascending."""
    groups: dict[tuple[int, str], list[LayerLoss]] = {}
    for row in losses:
        groups.setdefault((row.layer, row.method), []).append(row)
    return [
        replace(
            rows[0],
            task=", ".join(row.task for row in rows),
            queries=sum(row.queries for row in rows),
            loss=fmean(row.loss for row in rows),
            evicted_mass=fmean(row.evicted_mass for row in rows),
            bound=_mean([row.bound for row in rows]),
            bound_by_head=_mean([row.bound_by_head for row in rows]),
        )
        for _, rows in sorted(groups.items(), key=lambda group: group[0][0])
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
