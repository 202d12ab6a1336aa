"""Heat maps of layers and heads on a screen of any width: numbers where they fit, else digits for tenths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.report.figures.style import is_light, shade

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from kvsearch.report.fitting import FittingTable

MOST_BLOCKS = 2  # of heads; a map in more of them is none
MOST_CELLS = 2**14  # of a map; a larger one shows layers only


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A row per layer with a coloured cell per head, their sum or mean and, where given, the pattern of the layer.

    On a page too narrow for `MOST_BLOCKS` blocks of heads, a cell is a digit: tenths of the range of all values. Of
    more than `MOST_CELLS` heads there is a row per layer without them. `values` are [L, Hkv], `form` says how a number
    is written.
    """

    title: str
    values: Floats
    layers: Sequence[int]
    form: str = "{:.0f}"
    total: Literal["sum", "mean"] = "sum"
    patterns: Sequence[str] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the map that fits."""
        if self.values.size > MOST_CELLS:
            yield self._totals()
            yield f"{self.values.size:,} heads are too many for a map: --json has them all"
            return
        numbers = self._numbers()
        if len(numbers.blocks(console, options)) <= MOST_BLOCKS:
            yield numbers
            return
        yield self._shades(cell=2)
        low, high = (self.form.format(value) for value in (self.values.min(), self.values.max()))
        yield f"a digit is a tenth of the way from {low} (0) to {high} (9); numbers: a wider screen, a pipe, or --json"

    def _totals(self) -> FittingTable:
        made = self._table([])
        for at in range(len(self.values)):
            self._add(made, at, [])
        return made

    def _numbers(self) -> FittingTable:
        from rich.text import Text

        made = self._table([f" h{head} " for head in range(self.values.shape[1])])
        for at, row in enumerate(self.values.tolist()):
            cells = [Text(f" {self.form.format(value)} ", style=self._style(value)) for value in row]
            self._add(made, at, cells)
        return made

    def _shades(self, cell: int) -> FittingTable:
        """Return a map of digits in one column, which is folded where even these are too many."""
        from rich.text import Text

        heads = self.values.shape[1]
        made = self._table([f"heads 0 to {heads - 1}"])
        for at, row in enumerate(self.values.tolist()):
            cells = (Text(f"{self._tenth(value):>{cell}}", style=self._style(value)) for value in row)
            self._add(made, at, [Text.assemble(*cells)])
        made.columns[1].justify = "left"
        return made

    def _table(self, columns: Sequence[str]) -> FittingTable:
        from kvsearch.report.fitting import FittingTable

        named = [] if self.patterns is None else ["  pattern"]
        return FittingTable(self.title, ["layer ", *columns, f"  {self.total}", *named], left=named, padding=(0, 0))

    def _add(self, made: FittingTable, at: int, cells: Sequence[Text]) -> None:
        """Add the row of a layer."""
        values = self.values[at]
        last = values.sum() if self.total == "sum" else values.mean()
        words = [] if self.patterns is None else [f"  {self.patterns[at]}"]
        made.add_row(f"{self.layers[at]} ", *cells, f"  {self.form.format(last)}", *words)

    @cached_property
    def _range(self) -> tuple[float, float]:
        return float(self.values.min()), float(self.values.max())

    def _share(self, value: float) -> float:
        low, high = self._range
        return (value - low) / (high - low) if high > low else 0.5

    def _tenth(self, value: float) -> int:
        return min(int(10 * self._share(value)), 9)

    def _style(self, value: float) -> str:
        colour = red, green, blue = shade(self._share(value))
        return f"{'black' if is_light(colour) else 'white'} on rgb({red},{green},{blue})"


def heatmap(
    title: str,
    values: np.ndarray,
    layers: Sequence[int],
    form: str = "{:.0f}",
    total: Literal["sum", "mean"] = "sum",
    patterns: Sequence[str] | None = None,
) -> HeatMap:
    """Return a heat map; see `HeatMap`."""
    return HeatMap(title, np.asarray(values, np.float64), layers, form, total, patterns)
