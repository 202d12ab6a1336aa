"""Results on the terminal: tables and heat maps that fit the width without losing a cell, and named facts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from kvsearch.core.printed import escape_invisible, escape_line
from kvsearch.report.figures import Figure, HeatMap, ReportPart, find_shade, is_light
from kvsearch.report.table import Table

WIDEST_PAGE = 10_000  # columns of a page on which any table fits
MOST_CELLS = 2**14  # of a map; a larger one shows rows only


class View(Protocol):
    """Something to show: to programs as JSON, to people part by part."""

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""

    def parts(self) -> Iterable[ReportPart]:
        """Yield lines, facts, tables and maps from top to bottom."""


def align_facts(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield names and values, one pair a line, values aligned."""
    width = max(map(len, named))
    yield from (f"{name:<{width}}  {value}" for name, value in named.items())


def to_printable(part: Table | Figure) -> RenderableType:
    """Return a table or the maps of a figure for the screen."""
    return to_screen_table(part) if isinstance(part, Table) else Group(*to_screen_maps(part))


def to_screen_table(table: Table) -> Group:
    """Return a table for the screen, between its title and its notes."""
    style: dict[str, Any] = {}
    header = table.header
    if table.tight:
        style = {"padding": (0, 0, 0, 1), "show_edge": False, "pad_edge": False}
        header = [name.replace("_", "_\n") for name in header]
    shown = FittingTable(header, left=(*header[:1], *table.words), **style)
    for heading, rows in table.groups:
        if heading:
            shown.add_row(style_text(heading, "italic"))
        for row in rows:
            shown.add_row(*(style_text(cell.text, "bold" if cell.best else "") for cell in row))
        shown.add_section()
    return Group(style_text(table.title, "italic"), *map(style_text, table.above), shown, *map(style_text, table.notes))


def to_screen_maps(figure: Figure) -> Iterator[RenderableType]:
    """Yield the maps of a figure, one below the other: a row per row, a coloured cell per column, and the row's total.

    Of more than `MOST_CELLS` cells there are the totals alone.
    """
    body = figure.body
    assert isinstance(body, HeatMap)
    count = len(body.rows) * len(body.columns)
    columns = body.columns if count <= MOST_CELLS else ()
    for panel, rows in body.panels.items():
        yield style_text(f"{figure.title}, {panel}" if panel else figure.title, "italic")
        headings = [f"{body.row_label} ", *(f" {column} " for column in columns), f"  {body.total}"]
        table = FittingTable(headings, padding=(0, 0))
        for name, values in zip(body.rows, rows, strict=True):
            known = [value for value in values if value is not None]
            total = sum(known) / (len(known) if body.total == "mean" else 1) if known else None
            cells = [_colour_cell(value, body) for value in values[: len(columns)]]
            table.add_row(f"{name} ", *cells, f"  {'-' if total is None else body.form.format(total)}")
        yield table
        if not columns:
            yield f"{count:,} cells are too many for a map: --json has them all"


def _colour_cell(value: float | None, body: HeatMap) -> Text:
    """Return a value on its colour."""
    if value is None:
        return Text(" - ")
    low, high = body.ends
    red, green, blue = find_shade((value - low) / (high - low))
    ink = "black" if is_light((red, green, blue)) else "white"
    return Text(f" {body.form.format(value)} ", f"{ink} on rgb({red},{green},{blue})")


def style_text(text: str, style: str = "") -> Text:
    """Return data in a style, all of it visible; rich itself drops what rings, returns or goes back."""
    return Text(escape_line(text), style)


class FittingTable(RichTable):
    """A table in the style of all results: numbers at the right, columns named in `left` at the left.

    Where the page is too narrow, columns are shown in as few blocks as fit, with about as many in each and the first
    column in all of them. A column that is too wide by itself is folded.
    """

    def __init__(self, columns: Sequence[str], left: Sequence[str] = (), **style: object) -> None:
        super().__init__(**{"box": SIMPLE, **style})  # type: ignore[arg-type]
        for column in columns:
            # folded: on a narrow page, too, every digit is shown
            self.add_column(column, justify="left" if column in left else "right", overflow="fold")

    def blocks(self, console: Console, options: ConsoleOptions) -> list[RichTable]:
        """Return the tables that are shown on a page."""
        first, *others = self.columns
        wide = options.update(max_width=WIDEST_PAGE)
        blocks = [self._of([first, *others])]
        for count in range(2, len(others) + 1):
            if all(Measurement.get(console, wide, block).maximum <= options.max_width for block in blocks):
                break
            ends = [len(others) * part // count for part in range(count + 1)]
            blocks = [self._of([first, *others[begin:end]]) for begin, end in pairwise(ends)]
        return blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the blocks from top to bottom."""
        for block in self.blocks(console, options):
            yield from RichTable.__rich_console__(block, console, options)

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """Add a row; a text is shown on one line, as it is."""
        super().add_row(*(escape_invisible(cell, keep="") if isinstance(cell, str) else cell for cell in cells), **how)

    def _of(self, columns: Sequence[Column]) -> RichTable:
        """Return a plain table of some of the columns."""
        block = copy.copy(self)
        block.__class__ = RichTable  # type: ignore[assignment]
        block.columns = [replace(column, _index=at) for at, column in enumerate(columns)]
        return block
