"""How a result gets to the screen: its parts from top to bottom, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvsearch.core.printed import visible_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.cli.console import Console
    from kvsearch.report.screen import Part


def print_parts(parts: Iterable[Part | RenderableType], console: Console) -> None:
    """Print lines and facts, which are never broken, tables and maps."""
    from kvsearch.report.figures.data import Figure
    from kvsearch.report.screen import facts, printable
    from kvsearch.report.table import Table

    for part in parts:
        if isinstance(part, str | Mapping):
            for line in [part] if isinstance(part, str) else facts(part):
                console.out.print(visible_line(line), soft_wrap=True)
        else:
            console.out.print(printable(part) if isinstance(part, Table | Figure) else part)
