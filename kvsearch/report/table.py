"""A table of a result, and how it is written: on the screen, as Markdown, and as LaTeX with booktabs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvsearch.errors import UsageError
from kvsearch.plan.files import atomic_write, check_target
from kvsearch.printed import markdown_text, visible
from kvsearch.report.screen import screen_table

if TYPE_CHECKING:
    from rich.console import Group as Screen

MARKDOWN, CSV, LATEX = ".md", ".csv", ".tex"
# of LaTeX; the backslash first, the others bring new ones
SPECIAL = {"\\": r"\textbackslash{}", **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "~": r"\~{}", "^": r"\^{}"}


class Cell(NamedTuple):
    """Text, and whether it is the best of its block."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class RowGroup:
    """Rows under a common heading ("": none); the first cell of a row names it."""

    heading: str
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Table:
    """A table before it is written; the first column is of names, the others are of numbers.

    `notes` stand below it; what must be known to read it stands `above`.
    """

    title: str
    header: list[str]
    groups: list[RowGroup]
    notes: tuple[str, ...] = ()
    above: tuple[str, ...] = ()

    @classmethod
    def plain(cls, title: str, header: list[str], rows: Iterable[Sequence[str]], notes: tuple[str, ...] = ()) -> Table:
        """Return a table of one group in which nothing is marked."""
        return cls(title, header, [RowGroup("", [[Cell(text) for text in row] for row in rows])], notes)


def check_table_file(path: Path) -> None:
    """Raise UsageError if no table can be written to `path`: another suffix, or there can be no such file."""
    if path.suffix not in (MARKDOWN, CSV, LATEX):
        raise UsageError(f"cannot write a table to {path}: name a {MARKDOWN}, {CSV} or {LATEX} file")
    check_target(path)


def write_tables(tables: Iterable[Table], path: Path, overwrite: bool = True) -> None:
    """Write tables as Markdown or LaTeX, by the suffix."""
    render = markdown if path.suffix == MARKDOWN else latex
    atomic_write(path, "\n".join(map(render, tables)).encode(), overwrite)


def on_screen(table: Table) -> Screen:
    """Return a table for the screen, between its title and its notes."""
    from rich.console import Group as Screen

    from kvsearch.report.fitting import words

    made = screen_table("", table.header, left=table.header[:1])
    for group in table.groups:
        if group.heading:
            made.add_row(words(group.heading, "italic"))
        for row in group.rows:
            made.add_row(*(words(text, "bold" if best else "") for text, best in row))
        made.add_section()
    return Screen(words(table.title, "italic"), *map(words, table.above), made, *map(words, table.notes))


def markdown(table: Table) -> str:
    """Return a Markdown table under its title; the best cells are bold, headings of groups are rows of their own."""
    rows = [list(map(markdown_text, table.header)), ["---", *["---:"] * (len(table.header) - 1)]]
    for group in table.groups:
        if group.heading:
            rows.append([f"*{markdown_text(group.heading)}*", *[""] * (len(table.header) - 1)])
        for row in group.rows:
            cells = ((markdown_text(cell.text), cell.best) for cell in row)
            rows.append([f"**{text}**" if best else text for text, best in cells])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"- {markdown_text(note)}" for note in table.notes]
    above = [line for note in table.above for line in (markdown_text(note), "")]
    return "\n".join([f"**{markdown_text(table.title)}**", "", *above, *lines, *([""] if notes else []), *notes, ""])


def latex(table: Table) -> str:
    """Return a LaTeX table; it needs the package booktabs."""
    width = len(table.header)
    sentences = [f"{note[0].upper()}{note[1:]}." for note in (*table.above, *table.notes)]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(' '.join([table.title + '.', *sentences]))}}}",
        rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}",
        r"\toprule",
        _tex_row([Cell(text) for text in table.header]),
    ]
    for group in table.groups:
        lines.append(r"\midrule")
        if group.heading:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\emph{{{_tex(group.heading)}}}}} \\")
        lines += [_tex_row(row) for row in group.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _tex(text: str) -> str:
    return "".join(SPECIAL.get(mark, mark) for mark in visible(text, keep=""))


def _tex_row(row: Sequence[Cell]) -> str:
    """Return a row; the first cell is a name, in the others a hyphen before a digit is a minus."""
    name, *numbers = (_tex(cell.text) for cell in row)
    signed = (re.sub(r"-(?=\d)", "$-$", text) for text in numbers)
    cells = (rf"\textbf{{{text}}}" if cell.best else text for text, cell in zip([name, *signed], row, strict=True))
    return " & ".join(cells) + r" \\"
