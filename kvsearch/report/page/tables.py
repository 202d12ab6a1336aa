"""Tables of results for the page: what a column sorts by, and its intervals drawn on one scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvsearch.printed import csv_text
from kvsearch.report.page.markup import data_link, number, tag
from kvsearch.report.page.scale import Scale, fitted
from kvsearch.report.table import Table

LONG = 24  # rows
NUMBER = re.compile(r"<?[+-]?(?:\d+(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d+)?(?=$|[\s%/(\[])")
INTERVAL = re.compile(r"([+-]?[\d.]+)(?: points)? \[([+-]?[\d.]+), ([+-]?[\d.]+)\]")


@dataclass(frozen=True)
class PageCell:
    """A cell: its text, what it sorts by (None: the text says it itself) and its interval, drawn."""

    text: str
    best: bool
    key: float | None
    strip: Markup | None


@dataclass(frozen=True)
class PageGroup:
    """Rows under a heading."""

    heading: str
    rows: list[list[PageCell]]


@dataclass(frozen=True)
class PageTable:
    """A table as the page has it; `link` holds its CSV."""

    name: str
    title: str
    header: list[str]
    groups: list[PageGroup]
    above: tuple[str, ...]
    notes: tuple[str, ...]
    link: str

    @property
    def is_long(self) -> bool:
        """Whether it has a frame of its own, in which it is moved up and down."""
        return sum(len(group.rows) for group in self.groups) > LONG


def page_table(table: Table, name: str) -> PageTable:
    """Return a table for the page; `name` is that of its CSV file."""
    scales = [_scale([row[at].text for group in table.groups for row in group.rows if at < len(row)])
              for at in range(len(table.header))]  # fmt: skip
    groups = [
        PageGroup(group.heading, [
            [PageCell(cell.text, cell.best, _unsaid(cell.text), _strip(cell.text, scales[at]))
             for at, cell in enumerate(row)]
            for row in group.rows
        ])
        for group in table.groups
    ]  # fmt: skip
    return PageTable(name, table.title, table.header, groups, table.above, table.notes, data_link(table_csv(table)))


def table_csv(table: Table) -> str:
    """Return a table as CSV, the headings of its groups in a column of their own where it has any."""
    grouped = any(group.heading for group in table.groups)
    rows = [[*["group"] * grouped, *table.header]]
    for group in table.groups:
        rows += [[*[group.heading] * grouped, *(cell.text for cell in row)] for row in group.rows]
    return csv_text(rows)


def sort_key(text: str) -> float | None:
    """Return the number that a text begins with, None if it is none."""
    found = NUMBER.match(text)
    try:
        return float(found.group().lstrip("<").replace(",", "")) if found else None
    except ValueError:
        return None


def _unsaid(text: str) -> float | None:
    """Return what a cell sorts by, None where its text is that number or a word, which the script can tell."""
    found = sort_key(text)
    try:
        return None if found == float(text) else found
    except ValueError:
        return found


def _scale(texts: Sequence[str]) -> Scale | None:
    """Return the scale that a column of intervals shares; None where it has none, or they are all of no width."""
    found = [tuple(map(float, match.groups())) for text in texts if (match := INTERVAL.match(text))]
    signed = any(text.startswith(("+", "-")) for text in texts)
    ends = [value for one in found for value in one] + [0.0] * signed
    return fitted(ends, 0, 100, margin=0.05) if found and max(ends) > min(ends) else None


def _strip(text: str, scale: Scale | None) -> Markup | None:
    """Return the interval of a cell, drawn across; a line at zero where it is a difference."""
    match = INTERVAL.match(text)
    if scale is None or match is None:
        return None
    mean, low, high = (f"{number(scale(float(one)))}%" for one in match.groups())
    zero = f"{number(scale(0.0))}%"
    signed = scale.low <= 0 and text[0] in "+-"
    return tag(
        "svg",
        *[tag("line", x1=zero, x2=zero, y1="0", y2="10", class_="zero")] * signed,
        tag("line", x1=low, x2=high, y1="5", y2="5"),
        tag("circle", cx=mean, cy="5", r="2.8"),
        class_="strip",
    )  # fmt: skip
