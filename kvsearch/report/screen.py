"""What results on the screen are made of: tables in one style, facts with their names, and views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.report.fitting import FittingTable


class View(Protocol):
    """Something to show: to programs as JSON, to people part by part; a text is a line that is never broken."""

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        ...

    def parts(self) -> Iterator[RenderableType]:
        """Yield lines and tables from top to bottom."""
        ...


def screen_table(title: str, columns: Sequence[str], left: Sequence[str] = (), **style: Any) -> FittingTable:
    """Return an empty table in the style of all results, see `FittingTable`."""
    from kvsearch.report.fitting import FittingTable

    return FittingTable(title, columns, left, **style)


def listing(title: str, columns: Sequence[str]) -> FittingTable:
    """Return an empty table of words, as narrow as it can be; the names in its first column are never broken."""
    table = screen_table(title, columns, left=columns, padding=(0, 1, 0, 0), pad_edge=False)
    table.columns[0].no_wrap = True
    return table


def facts(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield names and values, one pair a line, values aligned."""
    width = max(map(len, named))
    yield from (f"{name:<{width}}  {value}" for name, value in named.items())
