"""What a figure shows, in numbers: CSV, the pictures of papers and those of the HTML page are all drawn from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvsearch.printed import csv_text

Style = Literal["line", "points", "steps", "level"]
Cells = Sequence[str | float | None]


class Axis(NamedTuple):
    """What an axis shows, with its unit, and whether its scale is logarithmic."""

    label: str
    log: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one name, `y` with the ends of its interval where there is one.

    Args:
        style: "line" joins the points, "points" does not, "steps" holds a value until the next; "level" is a
            horizontal line at its one `y`, without an `x`.
        muted: a control or a background, which stands behind the others.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    style: Style = "line"
    muted: bool = False


@dataclass(frozen=True)
class Lines:
    """Series over two axes."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]

    def table(self) -> Iterator[Cells]:
        """Yield the header, then a row per point; a level has no x."""
        yield ["series", self.x.label, self.y.label, "low", "high"]
        for one in self.series:
            for at, value in enumerate(one.y):
                ends: Cells = [ends[at] if ends else None for ends in (one.low, one.high)]
                yield [one.name, one.x[at] if one.x else None, value, *ends]


@dataclass(frozen=True)
class Panel:
    """One map: values [rows][columns], None where nothing is known."""

    name: str
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class HeatMap:
    """Maps of the same rows and columns side by side, on one scale of colours; `form` says how a value is written."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_label: str
    column_label: str
    value_label: str
    panels: tuple[Panel, ...]
    form: str = "{:.0f}"

    def table(self) -> Iterator[Cells]:
        """Yield the header, then a row per cell."""
        yield ["panel", self.row_label, self.column_label, self.value_label]
        for panel in self.panels:
            for name, row in zip(self.rows, panel.values, strict=True):
                yield from ((panel.name, name, column, value) for column, value in zip(self.columns, row, strict=True))


@dataclass(frozen=True)
class CategoryMap:
    """A map of names, [rows][columns]; an empty one is none."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_label: str
    column_label: str
    values: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names there are, in the order in which they come."""
        return tuple(dict.fromkeys(name for row in self.values for name in row if name))

    def table(self) -> Iterator[Cells]:
        """Yield the header, then a row per cell."""
        yield [self.row_label, self.column_label, "name"]
        for name, row in zip(self.rows, self.values, strict=True):
            yield from ((name, column, value) for column, value in zip(self.columns, row, strict=True))


@dataclass(frozen=True)
class Estimated:
    """A mean and its interval, with what it is of."""

    name: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Intervals:
    """Means with intervals, one under the other, by groups; `reference` is where nothing is won or lost."""

    x: Axis
    groups: tuple[tuple[str, tuple[Estimated, ...]], ...]
    reference: float | None = 0.0

    def table(self) -> Iterator[Cells]:
        """Yield the header, then a row per mean."""
        yield ["group", "name", self.x.label, "low", "high"]
        for group, found in self.groups:
            yield from ((group, one.name, one.mean, one.low, one.high) for one in found)


Body = Lines | HeatMap | CategoryMap | Intervals


@dataclass(frozen=True)
class Figure:
    """A figure: `name` is the stem of its files, `title` says what it shows, `caption` how that was measured."""

    name: str
    title: str
    caption: str
    body: Body

    def csv(self) -> str:
        """Return its numbers in full; cells that are not known are empty."""
        return csv_text(self.body.table())
