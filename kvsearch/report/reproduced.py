"""A paper's table made again: its cells beside the paper's numbers, as table, CSV and JSON; which tables there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvsearch.core.printed import csv_text
from kvsearch.papers.tables import TABLES, Key, PaperTable, Scale, find_table, numbers
from kvsearch.report.numbers import or_dash
from kvsearch.report.table import Cell, RowGroup, Table
from kvsearch.results.base import read_content

SCHEMA = "kvsearch.reproduction/1"
PAPER = "paper"
LEFT_OUT = "left out"
WRITTEN = ("schema", "table", "title", "caption", "notes", "cells")  # what is not among `content`
CSV_HEADER = ("table", "block", "row", "column", "value", "low", "high", "text", "paper")


@dataclass(frozen=True)
class MeasuredCell:
    """A cell: a value in points of 100 (or as its column says) with its 95% interval, or a text in its place.

    `block` is the heading that it is under; `key` is what the file of the paper's numbers calls that. Of `ranked` ones
    the highest of a column and block is marked.
    """

    row: str
    column: str
    value: float | None
    block: str = ""
    key: str = ""
    low: float | None = None
    high: float | None = None
    text: str = ""
    paper: float | None = None
    ranked: bool = False

    def beside(self, model: str | None, numbers: Mapping[Key, float]) -> MeasuredCell:
        """Return the cell with the paper's number of this model, if it is there."""
        return self if model is None else replace(self, paper=numbers.get((model, self.key, self.row, self.column)))

    @property
    def shown(self) -> str:
        """The cell as it is printed."""
        return self.text or or_dash(self.value, ".2f")


@dataclass(frozen=True)
class Reproduced:
    """The cells of a table, what stands above and below it, what it was made of, and its files once it is written."""

    name: str
    title: str
    cells: tuple[MeasuredCell, ...]
    caption: tuple[str, ...]
    notes: tuple[str, ...]
    content: Mapping[str, Any]
    files: tuple[Path, ...] = ()

    def tables(self) -> list[Table]:
        """Return a table for all blocks that have columns in common, in which a row of the paper's follows every row.

        The caption is that of the first, the notes are those of the last.
        """
        parts: list[list[MeasuredCell]] = []
        for block in dict.fromkeys(cell.block for cell in self.cells):
            mine = [cell for cell in self.cells if cell.block == block]
            if not parts or not {cell.column for cell in mine} & {cell.column for cell in parts[-1]}:
                parts.append([])
            parts[-1] += mine
        last = len(parts) - 1
        return [
            self._table(cells, self.caption if number == 0 else (), self.notes if number == last else ())
            for number, cells in enumerate(parts)
        ]

    def _table(self, cells: Sequence[MeasuredCell], caption: tuple[str, ...], notes: tuple[str, ...]) -> Table:
        columns = list(dict.fromkeys(cell.column for cell in cells))
        groups = [
            RowGroup(block, list(self._rows([cell for cell in cells if cell.block == block], columns)))
            for block in dict.fromkeys(cell.block for cell in cells)
        ]
        title = self.title if cells[0] is self.cells[0] else f"{self.title} (continued)"
        return Table(title, ["", *columns], groups, notes, caption)

    def _rows(self, cells: Sequence[MeasuredCell], columns: Sequence[str]) -> Iterator[list[Cell]]:
        best: dict[str, str] = {}  # how the highest of a column is printed, where not all are printed alike
        for column in columns:
            known = [cell for cell in cells if cell.ranked and cell.column == column and cell.value is not None]
            if len({cell.shown for cell in known}) > 1:
                best[column] = max(known, key=lambda cell: cell.value or 0.0).shown
        for row in dict.fromkeys(cell.row for cell in cells):
            mine = {cell.column: cell for cell in cells if cell.row == row}
            texts = {column: mine[column].shown if column in mine else "" for column in columns}
            ranked = {column for column, cell in mine.items() if cell.ranked}
            yield [
                Cell(row),
                *(Cell(text, column in ranked and text == best.get(column)) for column, text in texts.items()),
            ]
            if any(cell.paper is not None for cell in mine.values()):
                beside = (mine[column].paper if column in mine else None for column in columns)
                yield [Cell(f"{row}, {PAPER}"), *(Cell("" if value is None else f"{value:.2f}") for value in beside)]

    def as_json(self) -> dict[str, Any]:
        """Return everything: cells, caption, and the stages that they come from."""
        told = {"caption": list(self.caption), "notes": list(self.notes)}
        cells = list(map(asdict, self.cells))
        return {"schema": SCHEMA, "table": self.name, "title": self.title, **told, **self.content, "cells": cells}

    @classmethod
    def read(cls, data: Mapping[str, Any], path: Path) -> Reproduced:
        """Return what `as_json` has written to `path`; UsageError if that is damaged."""
        content = {name: value for name, value in data.items() if name not in WRITTEN}
        return read_content(cls, {**data, "name": data.get("table"), "content": content}, path)

    def csv(self) -> str:
        """Return a line per cell."""
        rows: list[Sequence[object]] = [CSV_HEADER]
        for cell in self.cells:
            numbers = (cell.value, cell.low, cell.high, cell.text, cell.paper)
            rows.append([self.name, cell.block, cell.row, cell.column, *numbers])
        return csv_text(rows)


def list_tables() -> Table:
    """Return which tables of papers there are: a name, where it is, what it shows, and the paper's models."""
    rows = [
        (table.name, f"{table.source}, {table.where}", table.shows, ", ".join(dict.fromkeys(table.models.values())))
        for table in TABLES.values()
    ]
    columns = ("name", "in the paper", "shows", "models")
    return Table.plain("tables of kvsearch reproduce", columns, rows, words=columns)


def describe_table(table: PaperTable) -> Iterator[str]:
    """Say all that is known of a table before it is made, line by line."""
    yield f"{table.name}: {table.source}, {table.where}: {table.shows}"
    yield f"models of the paper: {', '.join(table.models)}"
    yield f"asks: {_scale_words(table.paper)}; for the bundled models: {_scale_words(table.bundled)}"
    for stage in table.stages(table.paper):
        yield f"stage {stage.name}: {stage.job}, {stage.words}"
    yield from (f"not as in the paper: {change}" for change in table.changed)
    yield from (f"smaller for the bundled models: {change}" for change in table.smaller)
    yield f"numbers of the paper beside: {len(numbers(table.name)) or 'none'}"


def listing_json(name: str) -> dict[str, Any]:
    """Return all of one table or, without a name, the list of them; UsageError for an unknown one."""
    if not name:
        listed = list_tables()
        return {"tables": [dict(zip(listed.header, (cell.text for cell in row), strict=True)) for row in listed.rows]}
    paper_table = asdict(find_table(name))
    return {key: paper_table[key] for key in ("name", "source", "where", "shows", "models", "changed", "smaller")}


def _scale_words(scale: Scale) -> str:
    """Say what is asked and what is kept."""
    asks = [f"{ask.tasks}, at most {ask.samples} contexts of a task" for ask in scale.asks] or ["nothing"]
    budgets = ", ".join(map(str, scale.budgets))
    sizes = [f"{budgets} entries per kv head"] if budgets else [f"{100 * ratio:g}% evicted" for ratio in scale.ratios]
    return ", then ".join(asks) + f" ({', '.join(sizes)})"
