"""How a result gets to the screen: its parts from top to bottom, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvsearch.printed import visible_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.cli.console import Console
    from kvsearch.report.screen import View


def show_view(view: View, console: Console) -> None:
    """Print a view, as JSON if that is wanted."""
    if console.as_json:
        console.print_json(view.as_json())
    else:
        print_parts(view.parts(), console)


def print_parts(parts: Iterable[RenderableType], console: Console) -> None:
    """Print lines, which are never broken, and tables."""
    for part in parts:
        if isinstance(part, str):
            console.out.print(visible_line(part), soft_wrap=True)
        else:
            console.out.print(part)
