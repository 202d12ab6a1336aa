"""A console of rich that shows data as it is: its text is no markup, and nothing in it acts on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kvsearch.core.printed import visible, visible_line

if TYPE_CHECKING:
    from kvsearch.report.figures.data import Part


class Screen(Console):
    """All that commands print for people goes through one of these, on either channel.

    Texts are made visible before they are laid out, so that columns are as wide as what is shown; what a renderable
    brings ready-made is made visible when it is drawn.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text that shows every character of `text`."""
        return super().render_str(visible(text), **{**how, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is drawn: styles and moves of the cursor are rich's own, all else is text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def print_parts(self, parts: Iterable[Part | RenderableType]) -> None:
        """Print lines and facts, which are never broken, tables and maps."""
        from kvsearch.report.figures.data import Figure
        from kvsearch.report.screen import facts, printable
        from kvsearch.report.table import Table

        for part in parts:
            if isinstance(part, str | Mapping):
                for line in [part] if isinstance(part, str) else facts(part):
                    self.print(visible_line(line), soft_wrap=True)
            else:
                self.print(printable(part) if isinstance(part, Table | Figure) else part)

    def on_broken_pipe(self) -> None:
        """End the output, not the process: rich would exit with 1."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError
