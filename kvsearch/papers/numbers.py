"""The numbers that papers print, as data: one CSV file per table, a line per model, block and row.

A table is there only where its text can be read beyond doubt; what the text garbles is left out.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

Key = tuple[str, str, str, str]  # model, block ("128", "0.8", "4K 1024"), row, column


@cache
def numbers(table: str) -> Mapping[Key, float]:
    """Return what the paper prints in a table, in points of 100 unless it says otherwise; nothing without a file."""
    file = files(__package__).joinpath("numbers", f"{table}.csv")
    if not file.is_file():
        return {}
    found: dict[Key, float] = {}
    for line in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        place = line.pop("model"), line.pop("block"), line.pop("row")
        found.update({(*place, column): float(value) for column, value in line.items() if value})
    return found
