"""A layer x head heat map in the terminal: coloured cells with numbers, numbers alone where there is no colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

# dark blue (little) to yellow (much), readable with black or white digits
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


def heatmap(title: str, values: np.ndarray, layers: Sequence[int], form: str = "{:.0f}", total: str = "sum") -> Table:
    """A table with a row per layer, a coloured cell per head and a last column: the sum or mean of the layer."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0))
    table.add_column("layer ", justify="right")
    for head in range(values.shape[1]):
        table.add_column(f" h{head} ", justify="right")
    table.add_column(f"  {total}", justify="right")
    low, high = float(values.min()), float(values.max())
    for layer, row in zip(layers, values.tolist(), strict=True):
        cells = [Text(f" {form.format(value)} ", style=_style(value, low, high)) for value in row]
        last = sum(row) if total == "sum" else sum(row) / len(row)
        table.add_row(f"{layer} ", *cells, f"  {form.format(last)}")
    return table


def _style(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.5
    red, green, blue = RAMP[min(int(share * len(RAMP)), len(RAMP) - 1)]
    return f"{'black' if share > 0.55 else 'white'} on rgb({red},{green},{blue})"
