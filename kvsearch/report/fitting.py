"""Tables that fit any page: one that is too wide is broken into blocks of columns, and nothing of it is ever cut."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from kvsearch.printed import visible, visible_line

WIDEST = 10_000  # columns of a page on which any table fits


class FittingTable(Table):
    """A table in the style of all results: numbers at the right, columns named in `left` at the left.

    Its title stands above it and its caption below, as wide as the page. Where the page is too narrow, columns are
    shown in as few blocks as fit, with about as many in each and the first column in all of them. A column that is too
    wide by itself is folded.
    """

    def __init__(self, title: str, columns: Sequence[str], left: Sequence[str] = (), **style: object) -> None:
        super().__init__(**{"title": title, "title_justify": "left", "box": SIMPLE, **style})  # type: ignore[arg-type]
        for column in columns:
            # folded: on a narrow page, too, every digit is shown
            self.add_column(column, justify="left" if column in left else "right", overflow="fold")

    def blocks(self, console: Console, options: ConsoleOptions) -> list[Table]:
        """Return the tables that are shown on a page, without title and caption."""
        first, others = self.columns[:1], self.columns[1:]
        made = [self._of([*first, *others])]
        for count in range(2, len(others) + 1):
            if all(_width(one, console, options) <= options.max_width for one in made):
                break
            ends = [len(others) * part // count for part in range(count + 1)]
            made = [self._of([*first, *others[begin:end]]) for begin, end in pairwise(ends)]
        return made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield title, blocks and caption from top to bottom."""
        if self.title:
            yield _line(self.title, "italic")
        for block in self.blocks(console, options):
            yield from Table.__rich_console__(block, console, options)
        if self.caption:
            yield from (_line(note, "dim italic") for note in str(self.caption).split("\n"))

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """Add a row; a text is shown on one line, as it is."""
        super().add_row(*(visible(cell, keep="") if isinstance(cell, str) else cell for cell in cells), **how)

    def _of(self, columns: Sequence[Column]) -> Table:
        """Return a plain table of some of the columns."""
        block = copy.copy(self)
        block.__class__ = Table  # type: ignore[assignment]
        block.columns = [replace(column, _index=at) for at, column in enumerate(columns)]
        block.title = block.caption = None
        return block


def _width(table: Table, console: Console, options: ConsoleOptions) -> int:
    return Measurement.get(console, options.update(max_width=WIDEST), table).maximum


def words(text: str, style: str = "") -> Text:
    """Return data in a style, all of it visible; rich itself drops what rings, returns or goes back."""
    return Text(visible_line(text), style)


def _line(text: object, style: str) -> Text:
    return text if isinstance(text, Text) else words(str(text), style)
