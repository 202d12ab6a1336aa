"""What rich prints."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from kvsearch.cli.console import Screen
from kvsearch.report.figures import Figure
from kvsearch.report.screen import printable
from kvsearch.report.table import Table


def rendered(tables: Iterable[Any], width: int = 200) -> str:
    """The text of tables, without colours."""
    console = Screen(width=width, record=True, file=io.StringIO())
    for table in tables:
        console.print(printable(table) if isinstance(table, Table | Figure) else table)
    return console.export_text()
