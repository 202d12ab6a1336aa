"""Where the cells of a map are: the longer side lies across, names stand upright."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvsearch.report.figures.data import CategoryMap, HeatMap
from kvsearch.report.page.lines import DIGIT, WIDTH, shortened
from kvsearch.report.page.markup import number, tag
from kvsearch.report.page.scale import every

SHORT = 4  # letters of a name that is written below a cell
WIDEST, TALLEST, LOWEST = 40.0, 24.0, 7.0  # a cell


@dataclass(frozen=True)
class Grid:
    """Where cells are: what lies `across` and `upright`; `turned` where rows of the data lie across.

    No cell is lower than `lowest`.
    """

    across: tuple[str, ...]
    upright: tuple[str, ...]
    labels: tuple[str, str]
    turned: bool
    lowest: float

    @classmethod
    def of(cls, body: HeatMap | CategoryMap, lowest: float = LOWEST) -> Grid:
        """Return the grid of a map; long names of columns stand beside it."""
        named = max(map(len, body.columns), default=0) > SHORT
        if turned := named or len(body.rows) > len(body.columns):
            return cls(body.rows, body.columns, (body.row_label, body.column_label), turned, lowest)
        return cls(body.columns, body.rows, (body.column_label, body.row_label), turned, lowest)

    @property
    def left(self) -> float:
        """Room for the names of rows."""
        return min(14 + DIGIT * max(map(len, self.upright), default=0), 0.34 * WIDTH) + 10

    @property
    def width(self) -> float:
        """Of a cell."""
        return min(WIDEST, (WIDTH - self.left - 4) / max(len(self.across), 1))

    @property
    def height(self) -> float:
        """Of a cell."""
        return min(TALLEST, max(self.lowest, self.width * 0.8))

    def place(self, row: int, column: int) -> tuple[float, float]:
        """Return the upper left corner of a cell of the data, from the corner of the grid."""
        x, y = (row, column) if self.turned else (column, row)
        return self.left + x * self.width, y * self.height

    @property
    def gap(self) -> float:
        """Between cells, where there is room."""
        return 1.0 if self.width > 5 else 0.0

    def cell(self, row: int, column: int, top: float) -> str:
        """Return a cell of the data as a stroke as broad as `stroke`."""
        x, y = self.place(row, column)
        return f"M{number(x)} {number(top + y + (self.height - self.gap) / 2)}h{number(self.width - self.gap)}"

    def strokes(self, cells: Mapping[str, Sequence[str]]) -> Markup:
        """Return all cells, by their class."""
        paths = [tag("path", class_=name, d="".join(found)) for name, found in sorted(cells.items())]
        return tag("g", *paths, stroke_width=self.height - self.gap)

    def hits(self, top: float, first: int) -> str:
        """Return what the script needs to find a cell: corner, size, counts, the first row of the CSV, whether turned.

        Rows of the CSV are in the order of the data, row by row.
        """
        numbers = (self.left, top, self.width, self.height, len(self.across), len(self.upright), first)
        return " ".join([*(f"{value:.4g}" for value in numbers), str(int(self.turned))])

    def names(self, top: float, *, last: bool) -> Iterator[Markup]:
        """Yield the names beside a grid, and below the last one."""
        for at in every(len(self.upright), self.height, 9):
            y = top + (at + 0.5) * self.height + 3.5
            yield tag("text", shortened(self.upright[at], self.left - 20), x=self.left - 5, y=y, class_="end small")
        middle = top + len(self.upright) * self.height / 2
        turn = f"rotate(-90 8 {number(middle)})"
        yield tag("text", self.labels[1], x=8, y=middle + 3, transform=turn, class_="mid name")
        if last:
            longest = max(map(len, self.across), default=1) * DIGIT + 4
            bottom = top + len(self.upright) * self.height
            for at in every(len(self.across), self.width, longest):
                x = self.left + (at + 0.5) * self.width
                yield tag("text", self.across[at], x=x, y=bottom + 11, class_="mid small")
            x = self.left + len(self.across) * self.width / 2
            yield tag("text", self.labels[0], x=x, y=bottom + 24, class_="mid name")
