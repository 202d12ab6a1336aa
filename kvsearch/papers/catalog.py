"""Every table and figure that kvsearch makes again, by name."""

from __future__ import annotations

from kvsearch.errors import UsageError
from kvsearch.naming import unknown
from kvsearch.papers import evolkv, lava, lukv, polykv
from kvsearch.papers.table import PaperTable

TABLES: dict[str, PaperTable] = {table.name: table for paper in (polykv, lukv, lava, evolkv) for table in paper.TABLES}
# names by number of what has a better one
ALIASES: dict[str, str] = {
    f"{name.partition('-')[0]}-table{table.where.removeprefix('Table ')}": name
    for name, table in TABLES.items()
    if table.where.startswith("Table ")
}


def find_table(name: str) -> PaperTable:
    """Return a table by its name, or by its number in the paper; UsageError if there is none."""
    known = ALIASES.get(name, name)
    if known not in TABLES:
        raise UsageError(unknown("table", name, list(TABLES)))
    return TABLES[known]


def model_of(table: PaperTable, model: str) -> str | None:
    """Return what the paper calls a model, by the last part of its hub id or directory; None if it is not there."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return next((label for name, label in table.models.items() if name.lower() == last), None)
