"""Shades of values in cells: all panels below each other, on one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from kvsearch.report.figures.data import HeatMap
from kvsearch.report.figures.style import is_light, shade
from kvsearch.report.page.cells import Grid
from kvsearch.report.page.lines import WIDTH
from kvsearch.report.page.markup import number, tag

SHADES = 16
WRITTEN = 120  # cells of a figure that have room for their values
KEY_WIDTH = 160.0  # of the bar of shades


def heat_map(body: HeatMap) -> Markup:
    """Return all panels below each other, on one scale, and the bar of shades below them."""
    grid = Grid.of(body)
    known = [value for panel in body.panels for row in panel.values for value in row
             if value is not None and math.isfinite(value)]  # fmt: skip
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    parts, top, several = list[Markup](), 4.0, len(body.panels) > 1
    written = sum(len(panel.values) for panel in body.panels) * len(body.columns) <= WRITTEN
    for at, panel in enumerate(body.panels):
        if several or panel.name:
            parts.append(tag("text", panel.name, x=grid.left, y=top + 9, class_="panel"))
            top += 15
        parts.append(_shades(grid, panel.values, low, high, top))
        parts += _values(grid, body, panel.values, low, high, top) if written else []
        first = at * len(body.rows) * len(body.columns)
        parts.append(tag("g", data_map=grid.hits(top, first)))
        parts += grid.names(top, last=at == len(body.panels) - 1)
        top += len(grid.upright) * grid.height + 8
    top += 26
    parts += _bar(body, grid.left, top, low, high)
    return tag("svg", *parts, viewBox=f"0 0 {number(WIDTH)} {number(top + 24)}", role="img")


def shade_colour(number: int) -> tuple[int, int, int]:
    """Return the colour of a shade."""
    return shade(number / (SHADES - 1))


def _shade(value: float, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.5
    return min(int(share * SHADES), SHADES - 1)


def _shades(grid: Grid, values: Sequence[Sequence[float | None]], low: float, high: float, top: float) -> Markup:
    """Return one path per shade; cells without a value have a shade of their own."""
    paths: dict[str, list[str]] = {}
    for row, column, value in _items(values):
        shade = f"q{_shade(value, low, high)}" if value is not None and math.isfinite(value) else "none"
        paths.setdefault(shade, []).append(grid.cell(row, column, top))
    return grid.strokes(paths)


def _values(
    grid: Grid, body: HeatMap, values: Sequence[Sequence[float | None]], low: float, high: float, top: float
) -> Iterator[Markup]:
    """Yield the value of every cell, if all of them have room for theirs."""
    told = [(row, column, body.form.format(value), value) for row, column, value in _items(values)
            if value is not None and math.isfinite(value)]  # fmt: skip
    if max((len(text) for _, _, text, _ in told), default=9) * 5.4 > grid.width - 3 or grid.height < 10:
        return
    for row, column, text, value in told:
        x, y = grid.place(row, column)
        ink = "dark" if is_light(shade_colour(_shade(value, low, high))) else "light"
        place = {"x": x + grid.width / 2, "y": top + y + grid.height / 2 + 3}
        yield tag("text", text, **place, class_=f"mid small {ink}")


def _items(values: Sequence[Sequence[float | None]]) -> Iterator[tuple[int, int, float | None]]:
    for row, cells in enumerate(values):
        for column, value in enumerate(cells):
            yield row, column, value


def _bar(body: HeatMap, left: float, top: float, low: float, high: float) -> Iterator[Markup]:
    """Yield the bar of shades with its ends and what it is of."""
    step = KEY_WIDTH / SHADES
    for at in range(SHADES):
        place = f"M{number(left + at * step)} {number(top + 3.5)}h{number(step + 0.3)}"
        yield tag("path", class_=f"q{at}", d=place, stroke_width=7)
    yield tag("text", body.form.format(low), x=left, y=top + 18, class_="small")
    yield tag("text", body.form.format(high), x=left + KEY_WIDTH, y=top + 18, class_="end small")
    yield tag("text", body.value_label, x=left + KEY_WIDTH / 2, y=top + 18, class_="mid small name")
