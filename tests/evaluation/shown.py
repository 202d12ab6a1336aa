"""What rich prints."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from kvsearch.cli.screen import Screen


def rendered(tables: Iterable[Any], width: int = 200) -> str:
    """The text of tables, without colours."""
    console = Screen(width=width, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()
