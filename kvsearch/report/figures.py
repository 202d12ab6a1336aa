"""What a figure shows, in numbers: CSV, pictures of papers and of the page, and maps on the screen are made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsearch.core.printed import format_csv
from kvsearch.report.table import Table

Style = Literal["line", "steps", "level"]
Role = Literal["", "muted", "candidate", "baseline", "written"]
Cells = Sequence[str | float | None]
CellValues = tuple[tuple[float | None, ...], ...]
# dark blue (little) to yellow (much), lightness rising evenly, so that it reads in grey
RAMP = (
    (13, 8, 135),
    (84, 2, 163),
    (139, 10, 165),
    (185, 50, 137),
    (219, 92, 104),
    (244, 136, 73),
    (254, 188, 43),
    (240, 249, 33),
)


@dataclass(frozen=True)
class Series:
    """Points of one name, `y` with the ends of its interval where there is one.

    Args:
        style: "line" joins the points, "steps" holds a value until the next; "level" is a horizontal line at its one
            `y`, without an `x`.
        role: "muted" is a control or a background, which stands behind the others; the rest is for `LineChart.full`.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    style: Style = "line"
    role: Role = ""


@dataclass(frozen=True)
class LineChart:
    """Series over two axes, whose labels with units are `x` and `y`; an axis with `log` is logarithmic.

    `form` says how a value of `y` is written beside a plan.

    With `full`, the entries of the full cache, it shows plans by their roles: x are entries up to these, every
    candidate and baseline is named, and what was written is marked.
    """

    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    full: float | None = None
    form: str = "{:.1f}"

    def table(self) -> Iterator[Cells]:
        """Yield the header, then a row per point; a level has no x."""
        yield ["series", self.x, self.y, "low", "high"]
        for series in self.series:
            for at, value in enumerate(series.y):
                ends: Cells = [ends[at] if ends else None for ends in (series.low, series.high)]
                yield [series.name, series.x[at] if series.x else None, value, *ends]


@dataclass(frozen=True)
class HeatMap:
    """Maps of the same rows and columns side by side, on one scale of colours; `form` says how a value is written.

    `panels` are values [rows][columns] by the name of a map, None where nothing is known.

    On the screen, the `total` of a row stands beside it. `scale` are the values at the ends of the colours, by default
    the least and the largest.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_label: str
    column_label: str
    value_label: str
    panels: Mapping[str, CellValues]
    form: str = "{:.0f}"
    total: Literal["sum", "mean"] = "mean"
    scale: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The values of the first and the last colour."""
        known = [value for panel in self.panels.values() for row in panel for value in row if value is not None]
        low, high = self.scale or (min(known, default=0.0), max(known, default=1.0))
        return (low, high) if low < high else (min(0.0, 2 * low), max(0.0, 2 * high) or 1.0)

    def table(self) -> Iterator[Cells]:
        """Yield the header, then a row per cell."""
        yield ["panel", self.row_label, self.column_label, self.value_label]
        for panel, values in self.panels.items():
            for name, row in zip(self.rows, values, strict=True):
                yield from ((panel, name, column, value) for column, value in zip(self.columns, row, strict=True))


Body = LineChart | HeatMap


@dataclass(frozen=True)
class Figure:
    """A figure: `name` is the stem of its files, `title` says what it shows, `caption` how that was measured.

    `leads`: it belongs to the answer, which a page begins with.
    """

    name: str
    title: str
    caption: str
    body: Body
    leads: bool = False

    def csv(self) -> str:
        """Return its numbers in full; cells that are not known are empty."""
        return format_csv(self.body.table())

    def as_json(self) -> dict[str, Any]:
        """Return the title and the numbers, a list per row of the CSV."""
        return {"title": self.title, "rows": [list(row) for row in self.body.table()]}


ReportPart = str | Mapping[str, Any] | Table | Figure  # of what is shown: a line, facts, a table, or a figure of maps


def make_layer_map(
    panels: Mapping[str, Any], layers: Sequence[object], value: str, form: str = "{:.0f}", **details: Any
) -> HeatMap:
    """Return maps of layers and kv heads, of `panels` [L, Hkv] by their names."""
    (first, *_) = panels.values()
    heads = tuple(f"h{head}" for head in range(first.shape[1]))
    maps = {name: make_cells(values) for name, values in panels.items()}
    return HeatMap(tuple(map(str, layers)), heads, "layer", "kv head", value, maps, form, **details)


def make_cells(values: Any) -> CellValues:
    """Return an array [R, C] as the cells of a panel, None for what is not a number."""
    return tuple(tuple(float(value) if value == value else None for value in row) for row in values.tolist())


def find_shade(share: float) -> tuple[int, int, int]:
    """Return the colour of a value that lies at `share` of its range, 0 to 1: red, green and blue, 0 to 255."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (
        round(below + (above - below) * (place - low)) for below, above in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def is_light(colour: tuple[int, int, int]) -> bool:
    """Tell whether black is read better on a colour than white (luma of ITU-R BT.601)."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue > 128
