"""Tables of results, with the numbers in them, and how they are written: as Markdown, CSV, and LaTeX with booktabs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_target
from kvsearch.core.printed import escape_invisible, escape_markdown, format_csv, pluralize
from kvsearch.runs.estimates import Difference, Estimate

if TYPE_CHECKING:
    from kvsearch.selection.records import QuestionCount
    from kvsearch.tasks.base import Coverage

MARKDOWN = ".md"
CSV = ".csv"
LATEX = ".tex"
# of LaTeX; the backslash first, the others bring new ones
SPECIAL = {"\\": r"\textbackslash{}", **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "~": r"\~{}", "^": r"\^{}"}


# --- numbers and counts ----------------------------------------------------------------------------------------------


def format_percent(share: float, digits: int = 2) -> str:
    """Write a share as percent, without the sign."""
    return f"{100 * share:.{digits}f}"


def format_chance(share: float) -> str:
    """Format a p-value in three digits; a sampled test never shows a p-value of zero."""
    return "<0.001" if share < 0.0005 else f"{share:.3f}"


def format_bounds(estimate: Estimate, form: str = ".2f", unit: float = 100) -> str:
    """Write the ends of an interval in a format, times `unit`, [low, high], or over how many contexts there is none."""
    if math.isnan(estimate.low):
        return f"[{pluralize(estimate.contexts or 0, 'context')}: no interval]"
    return f"[{unit * estimate.low:{form}}, {unit * estimate.high:{form}}]"


def format_interval(estimate: Estimate, form: str = ".2f", unit: float = 100, noun: str = "") -> str:
    """Write a mean with its interval in a format, times `unit`; a noun such as " points" goes between the two."""
    return f"{unit * estimate.mean:{form}}{noun} {format_bounds(estimate, form, unit)}"


def format_nats(estimate: Estimate, sign: str = "") -> str:
    """Write a loss in nats per token with its interval; `sign` "+" is for a difference."""
    return format_interval(estimate, f"{sign}.4f", unit=1)


def format_outcomes(difference: Difference) -> str:
    """Write how many questions were won, tied and lost."""
    return f"{difference.wins} / {difference.ties} / {difference.losses}"


def describe_coverage(coverage: Sequence[Coverage]) -> str:
    """Describe the evaluated questions of some tasks, with lengths and splits where known."""
    lengths = [length for task in coverage for length in (task.shortest, task.longest)]
    questions = sum(task.questions for task in coverage)
    text = _describe_counts(questions, sum(task.contexts for task in coverage), lengths)
    splits = dict.fromkeys(task.split for task in coverage if task.split is not None)
    return f"{text}, split {' and '.join(splits)}" if splits else text


def describe_questions(count: QuestionCount) -> str:
    """Format the number of evaluated questions and contexts."""
    return _describe_counts(count.questions, count.contexts, (count.shortest, count.longest))


def _describe_counts(questions: int, contexts: int, lengths: Sequence[int | None]) -> str:
    text = f"{pluralize(questions, 'question')} about {pluralize(contexts, 'context')}"
    known = [length for length in lengths if length is not None]
    if not known:
        return text
    low = min(known)
    high = max(known)
    return f"{text} of {pluralize(low, 'token') if low == high else f'{low} to {high} tokens'}"


# --- tables ----------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Text, whether it is the best of its block, and the number that it says where it says one."""

    text: str
    best: bool = False
    value: float | None = None

    @classmethod
    def of(cls, value: str | int) -> Cell:
        """Return a text or a count."""
        return cls(value) if isinstance(value, str) else cls(str(value), value=value)

    @classmethod
    def number(cls, value: float | None, form: str, unit: str = "") -> Cell:
        """Return a number in a format and its unit; None and NaN are a dash."""
        if value is None or not math.isfinite(value):
            return cls("-" if value is None or value != value else str(value))
        return cls(f"{value:{form}}{unit}", value=value)

    @classmethod
    def mean(cls, estimate: Estimate, form: str = ".2f") -> Cell:
        """Return a mean in percent with its interval."""
        return cls(format_interval(estimate, form), value=estimate.mean)

    @classmethod
    def nats(cls, loss: Estimate | None, sign: str = "", best: bool = False) -> Cell:
        """Return a loss in nats per token with its interval, or a difference with `sign` "+"; nothing of None."""
        return cls("") if loss is None else cls(format_nats(loss, sign), best, loss.mean)


RowGroup = tuple[str, list[list[Cell]]]  # a common heading ("": none), and rows, of which the first cell is the name


@dataclass(frozen=True)
class Table:
    """A table before it is written; the first column and those in `words` are of names, the others of numbers.

    `notes` stand below it; what must be known to read it stands `above`. On the screen, `tight` columns are close.
    """

    title: str
    header: Sequence[str]
    groups: Sequence[RowGroup]
    notes: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tight: bool = False

    @classmethod
    def plain(cls, title: str, header: Sequence[str], rows: Iterable[Sequence[Any]], **details: Any) -> Table:
        """Return a table of one group; what is no cell is printed as it is."""
        cells = [[cell if isinstance(cell, Cell) else Cell.of(cell) for cell in row] for row in rows]
        return cls(title, header, [("", cells)], **details)

    @classmethod
    def numbers(
        cls, title: str, header: Sequence[str], rows: Iterable[tuple[str | int, Iterable[float]]], form: str
    ) -> Table:
        """Return a table of one group: names, and beside each its numbers in one format."""
        lines = [[name, *(Cell.number(float(value), form) for value in values)] for name, values in rows]
        return cls.plain(title, header, lines)

    @property
    def rows(self) -> list[list[Cell]]:
        """The rows of all groups."""
        return [row for _, rows in self.groups for row in rows]

    def as_json(self) -> dict[str, Any]:
        """Return the title and the rows by column, numbers in full."""
        rows = [[cell.text if cell.value is None else cell.value for cell in row] for row in self.rows]
        return {"title": self.title, "header": list(self.header), "rows": rows, "notes": [*self.above, *self.notes]}


def check_table_file(path: Path) -> None:
    """Raise UsageError if no table can be written to `path`: another suffix, or there can be no such file."""
    if path.suffix not in (MARKDOWN, CSV, LATEX):
        raise UsageError(f"cannot write a table to {path}: name a {MARKDOWN}, {CSV} or {LATEX} file")
    check_target(path)


def to_csv(table: Table) -> str:
    """Return a table as CSV, the headings of its groups in a column of their own where it has any."""
    grouped = any(heading for heading, _ in table.groups)
    lines = [["group", *table.header] if grouped else table.header]
    for heading, rows in table.groups:
        first = [heading] if grouped else []
        lines += [[*first, *(cell.text for cell in row)] for row in rows]
    return format_csv(lines)


def to_markdown(table: Table) -> str:
    """Return a Markdown table under its title; the best cells are bold, headings of groups are rows of their own."""
    written = [list(map(escape_markdown, table.header)), ["---", *["---:"] * (len(table.header) - 1)]]
    for heading, rows in table.groups:
        if heading:
            written.append([f"*{escape_markdown(heading)}*", *[""] * (len(table.header) - 1)])
        for row in rows:
            cells = ((escape_markdown(cell.text), cell.best) for cell in row)
            written.append([f"**{text}**" if best else text for text, best in cells])
    lines = [f"| {' | '.join(row)} |" for row in written]
    notes = [f"- {escape_markdown(note)}" for note in table.notes]
    above = [line for note in table.above for line in (escape_markdown(note), "")]
    return "\n".join([f"**{escape_markdown(table.title)}**", "", *above, *lines, *([""] if notes else []), *notes, ""])


def to_latex(table: Table) -> str:
    """Return a LaTeX table; it needs the package booktabs."""
    width = len(table.header)
    sentences = [f"{note[0].upper()}{note[1:]}." for note in (*table.above, *table.notes)]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape_tex(' '.join([table.title + '.', *sentences]))}}}",
        rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}",
        r"\toprule",
        _make_tex_row(list(map(Cell, table.header))),
    ]
    for heading, rows in table.groups:
        lines.append(r"\midrule")
        if heading:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\emph{{{_escape_tex(heading)}}}}} \\")
        lines += [_make_tex_row(row) for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _escape_tex(text: str) -> str:
    return "".join(SPECIAL.get(mark, mark) for mark in escape_invisible(text, keep=""))


def _make_tex_row(row: Sequence[Cell]) -> str:
    """Return a row; the first cell is a name, in the others a hyphen before a digit is a minus."""
    name, *numbers = (_escape_tex(cell.text) for cell in row)
    signed = (re.sub(r"-(?=\d)", "$-$", text) for text in numbers)
    cells = (rf"\textbf{{{text}}}" if cell.best else text for text, cell in zip([name, *signed], row, strict=True))
    return " & ".join(cells) + r" \\"
