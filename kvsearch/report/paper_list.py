"""Which tables of papers there are, and all that is known of one before it is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvsearch.papers.catalog import TABLES, find_table
from kvsearch.papers.numbers import numbers
from kvsearch.papers.table import PaperTable, Scale

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("name", "in the paper", "shows", "models")


def rows() -> list[tuple[str, str, str, str]]:
    """Return a line per table: its name, where it is, what it shows, and the paper's models."""
    return [
        (table.name, f"{table.source}, {table.where}", table.shows, ", ".join(dict.fromkeys(table.models.values())))
        for table in TABLES.values()
    ]


def as_json(name: str = "") -> dict[str, Any]:
    """Return all of one table, or the list of them; UsageError for an unknown one."""
    if not name:
        return {"tables": [dict(zip(COLUMNS, row, strict=True)) for row in rows()]}
    table = find_table(name)
    return {
        "name": table.name, "paper": table.source, "where": table.where, "shows": table.shows,
        "models": dict(table.models), "changed": list(table.changed), "smaller": list(table.smaller),
        "numbers": len(numbers(table.name)),
        "stages": {
            form: [{"name": stage.name, "job": stage.job, "what": stage.words} for stage in table.stages(scale)]
            for form, scale in (("paper", table.paper), ("bundled", table.bundled))
        },
    }  # fmt: skip


def parts(name: str = "") -> Iterator[RenderableType]:
    """Yield the list of tables for the screen, or all of one; UsageError for an unknown one."""
    from kvsearch.report.screen import listing

    if name:
        yield from lines(find_table(name))
        return
    found = listing("tables of kvsearch reproduce", COLUMNS)
    for row in rows():
        found.add_row(*row)
    yield found


def lines(table: PaperTable) -> Iterator[str]:
    """Say all of a table, line by line."""
    yield f"{table.name}: {table.source}, {table.where}: {table.shows}"
    yield f"models of the paper: {', '.join(table.models)}"
    yield f"asks: {_asked(table.paper)}; for the bundled models: {_asked(table.bundled)}"
    for stage in table.stages(table.paper):
        yield f"stage {stage.name}: {stage.job}, {stage.words}"
    yield from (f"not as in the paper: {one}" for one in table.changed)
    yield from (f"smaller for the bundled models: {one}" for one in table.smaller)
    known = len(numbers(table.name))
    yield f"numbers of the paper beside: {known}" if known else "numbers of the paper beside: none"


def _asked(scale: Scale) -> str:
    """Return what is asked and kept, in words."""
    asks = [f"{ask.tasks}, at most {ask.samples} contexts of a task" for ask in scale.asks] or ["nothing"]
    budgets = ", ".join(map(str, scale.budgets))
    sizes = [f"{budgets} entries per kv head"] if budgets else [f"{100 * ratio:g}% evicted" for ratio in scale.ratios]
    return ", then ".join(asks) + f" ({', '.join(sizes)})"
