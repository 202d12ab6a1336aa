"""What results on the screen are made of: tables in one style, facts with their names, heat maps, and views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType
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


class View(Protocol):
    """Something to show: to programs as JSON, to people part by part; a text is a line that is never broken."""

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        ...

    def parts(self) -> Iterator[RenderableType]:
        """Yield lines and tables from top to bottom."""
        ...


def screen_table(title: str, columns: Sequence[str], left: Sequence[str] = (), **style: Any) -> Table:
    """Return an empty table in the style of all results: numbers at the right, columns named in `left` at the left."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, **style)
    for column in columns:
        # folded: on a narrow page, too, every digit is shown
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def listing(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table of words, as narrow as it can be; the names in its first column are never broken."""
    table = screen_table(title, columns, left=columns, padding=(0, 1, 0, 0), pad_edge=False)
    table.columns[0].no_wrap = True
    return table


def facts(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield names and values, one pair a line, values aligned."""
    width = max(map(len, named))
    yield from (f"{name:<{width}}  {value}" for name, value in named.items())


def heatmap(
    title: str,
    values: np.ndarray,
    layers: Sequence[int],
    form: str = "{:.0f}",
    total: str = "sum",
    patterns: Sequence[str] | None = None,
) -> Table:
    """Return a row per layer: a coloured cell per head, their sum or mean, and the pattern of the layer, if given."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0))
    table.add_column("layer ", justify="right")
    for head in range(values.shape[1]):
        table.add_column(f" h{head} ", justify="right")
    table.add_column(f"  {total}", justify="right")
    if patterns is not None:
        table.add_column("  pattern", overflow="fold")
    low, high = float(values.min()), float(values.max())
    for at, (layer, row) in enumerate(zip(layers, values.tolist(), strict=True)):
        cells = [Text(f" {form.format(value)} ", style=_style(value, low, high)) for value in row]
        last = sum(row) if total == "sum" else sum(row) / len(row)
        words = [] if patterns is None else [Text(f"  {patterns[at]}")]
        table.add_row(f"{layer} ", *cells, f"  {form.format(last)}", *words)
    return table


def _style(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.5
    red, green, blue = RAMP[min(int(share * len(RAMP)), len(RAMP) - 1)]
    return f"{'black' if share > 0.55 else 'white'} on rgb({red},{green},{blue})"
