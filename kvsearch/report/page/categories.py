"""A colour and a letter for a name in every cell: which policy a layer has in each phase."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from kvsearch.report.figures.data import CategoryMap
from kvsearch.report.figures.style import COLOURS
from kvsearch.report.page.cells import Grid
from kvsearch.report.page.lines import WIDTH, Key
from kvsearch.report.page.markup import number, tag

LOWEST = 16.0  # cell
LETTERED = 8.5  # wide is a cell that has room for its letter


def category_map(body: CategoryMap) -> tuple[Markup, list[Key]]:
    """Return cells with a colour and a letter for each name, and their legend."""
    grid = Grid.of(body, LOWEST)
    names, letters = body.names, _letters(body.names)
    colours = {name: at % len(COLOURS) for at, name in enumerate(names)}
    paths: dict[str, list[str]] = {}
    parts = list[Markup]()
    for row, cells in enumerate(body.values):
        for column, name in enumerate(cells):
            paths.setdefault(f"f{colours[name]}" if name else "none", []).append(grid.cell(row, column, 4))
            if name and grid.width >= LETTERED:
                x, y = grid.place(row, column)
                place = {"x": x + grid.width / 2 - 0.5, "y": 4 + y + grid.height / 2 + 2.5}
                parts.append(tag("text", letters[name], **place, class_=f"mid tiny t{colours[name]}"))
    bottom = 4 + len(grid.upright) * grid.height + 30
    hits = tag("g", data_map=grid.hits(4, 0))
    drawing = tag("svg", grid.strokes(paths), *parts, hits, *grid.names(4, last=True),
                  viewBox=f"0 0 {number(WIDTH)} {number(bottom)}", role="img")  # fmt: skip
    keys = [Key(at, name, f"swatch f{colours[name]} t{colours[name]}", letters[name]) for at, name in enumerate(names)]
    return drawing, keys


def _letters(names: Sequence[str]) -> dict[str, str]:
    """Return a letter for each name: its first that no other has, or a number where all are taken."""
    found: dict[str, str] = {}
    for name in names:
        free = (one.upper() for one in name if one.isalnum() and one.upper() not in found.values())
        found[name] = next(free, str(len(found) % 10))
    return found
