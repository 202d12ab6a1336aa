"""Tables on the screen and in files: Markdown, LaTeX with booktabs, and CSV with every number."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.errors import UsageError
from kvsearch.evaluation.averages import SizeBlock
from kvsearch.evaluation.compare import Comparison
from kvsearch.evaluation.statistics import Row
from kvsearch.plan.files import atomic_write, check_target
from kvsearch.report.tables import (
    Cell,
    Columns,
    TextTable,
    difference_table,
    held_table,
    mean_columns,
    score_table,
    screen_columns,
)
from kvsearch.strategies.methods import FULL

if TYPE_CHECKING:
    from rich.console import Group

MARKDOWN, CSV, LATEX = ".md", ".csv", ".tex"
CSV_HEADER = (
    "size", "method", "column", "kind", "questions", "score", "score_low", "score_high", "subject", "difference",
    "difference_low", "difference_high", "wins", "ties", "losses", "entries", "protocol", "phases",
)  # fmt: skip
# of LaTeX; the backslash first, the others bring new ones
SPECIAL = {"\\": r"\textbackslash{}", **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "~": r"\~{}", "^": r"\^{}"}


def all_tables(result: Comparison, columns: Columns | None = None) -> list[TextTable]:
    """Scores, differences and what is held; columns by default as a screen has room for them."""
    chosen = columns or screen_columns(result)
    return [
        score_table(result, chosen),
        difference_table(result, mean_columns(result)),
        held_table(result),
    ]


def check_table_file(path: Path) -> None:
    """UsageError if `write_tables` cannot write `path`: another suffix, or there can be no such file."""
    if path.suffix not in (MARKDOWN, CSV, LATEX):
        raise UsageError(f"cannot write a table to {path}: name a {MARKDOWN}, {CSV} or {LATEX} file")
    check_target(path)


def write_tables(result: Comparison, path: Path, columns: Columns = "tasks") -> None:
    """Write the tables as Markdown or LaTeX, or every number in rows as CSV, by the suffix; see `check_table_file`."""
    check_table_file(path)
    if path.suffix == CSV:
        atomic_write(path, csv_rows(result).encode())
        return
    render = markdown if path.suffix == MARKDOWN else latex
    atomic_write(path, "\n".join(render(table) for table in all_tables(result, columns)).encode())


def on_screen(table: TextTable) -> Group:
    """A table for the screen, between its title and its notes."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE)
    for index, column in enumerate(table.header):
        made.add_column(Text(column), justify="left" if index == 0 else "right")
    for group in table.groups:
        if group.heading:
            made.add_row(Text(group.heading, style="italic"))
        for row in group.rows:
            made.add_row(*(Text(text, style="bold" if best else "") for text, best in row))
        made.add_section()
    return Group(Text(table.title, style="italic"), made, *(Text(note) for note in table.notes))


def markdown(table: TextTable) -> str:
    """A Markdown table under its title; the best cells are bold, headings of groups are rows of their own."""
    rows = [table.header, ["---", *["---:"] * (len(table.header) - 1)]]
    for group in table.groups:
        if group.heading:
            rows.append([f"*{group.heading}*", *[""] * (len(table.header) - 1)])
        rows += [[f"**{cell.text}**" if cell.best else cell.text for cell in row] for row in group.rows]
    lines = ["| " + " | ".join(text.replace("|", r"\|") for text in row) + " |" for row in rows]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"**{table.title}**", "", *lines, *([""] if notes else []), *notes, ""])


def latex(table: TextTable) -> str:
    """A LaTeX table; needs the package booktabs."""
    width = len(table.header)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(' '.join([table.title + '.', *_sentences(table)]))}}}"]
    lines += [
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


def csv_rows(result: Comparison) -> str:
    """A row per size, method and column; scores in [0, 1], differences to the subject at the same size."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for block in result.blocks:
        for name, label in {FULL: FULL, **block.methods}.items():
            for row in block.rows:
                numbers = _numbers(block, row, label)
                size = "" if block.size is None else str(block.size)
                asked = (result.held[label].entries, result.protocol, result.phases)
                writer.writerow([size, name, *numbers[:6], result.subject, *numbers[6:], *asked])
    return text.getvalue()


def _numbers(block: SizeBlock, row: Row, label: str) -> list[object]:
    score = row.scores[label]
    compared: Sequence[object] = [""] * 6
    if label != block.subject:
        found = block.difference(row, label)
        compared = [found.mean, found.low, found.high, found.wins, found.ties, found.losses]
    return [row.task, row.kind, row.questions, score.mean, score.low, score.high, *compared]


def _tex(text: str) -> str:
    return "".join(SPECIAL.get(mark, mark) for mark in text)


def _tex_row(row: Sequence[Cell]) -> str:
    """A row; the first cell is a name, in the others a hyphen before a digit is a minus."""
    name, *numbers = (_tex(cell.text) for cell in row)
    signed = (re.sub(r"-(?=\d)", "$-$", text) for text in numbers)
    cells = (rf"\textbf{{{text}}}" if cell.best else text for text, cell in zip([name, *signed], row, strict=True))
    return " & ".join(cells) + r" \\"


def _sentences(table: TextTable) -> Iterator[str]:
    for note in table.notes:
        yield f"{note[0].upper()}{note[1:]}."
