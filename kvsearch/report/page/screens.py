"""The tables of what was opened: those that `kvsearch show` has, with what sorts and what is best in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvsearch.plan import Profile
from kvsearch.report.page.told_files import RATIO, has_importance
from kvsearch.report.table import Table

if TYPE_CHECKING:
    from kvsearch.report.reader import Opened


def tables_of(opened: Opened) -> list[Table]:
    """Return all tables of what was opened, but for maps of layers and heads, which are figures."""
    content: Any = opened.content
    if content is None:
        return []
    if opened.kind == "evaluation":
        from kvsearch.report import evaluation

        losses = [] if content.losses is None else _losses(content)
        return [*evaluation.tables(content), *losses]
    if opened.kind == "selection":
        from kvsearch.report import selection

        return selection.tables(*content)
    if opened.kind == "run":
        from kvsearch.report import run

        return run.tables([one.selection for one in content.choices])
    if opened.kind == "search":
        from kvsearch.report import search

        return [] if content.result is None else search.tables(content.result)
    if isinstance(content, Profile) and content.metadata.method == "lukv" and not has_importance(content):
        return []
    return list(_shown(opened))


def _losses(content: Any) -> list[Table]:
    from kvsearch.report.losses import losses_table

    return list(
        _from_screen(losses_table(f"{content.model}, phases: {content.phases}", content.protocol, content.losses))
    )


def _shown(opened: Opened) -> Iterator[Table]:
    """Yield the tables that a view prints; a line above one that has no title is its title."""
    from kvsearch.report.views import view_of

    above = ""
    for part in view_of(opened, RATIO).parts():
        yield from _from_screen(part, above)
        above = part if isinstance(part, str) else ""


def _from_screen(part: object, title: str = "") -> Iterator[Table]:
    """Yield the tables in something that is printed: one alone, or between its title and its notes."""
    from rich.console import Group
    from rich.table import Table as ScreenTable
    from rich.text import Text

    if isinstance(part, Group):
        texts = [one.plain for one in part.renderables if isinstance(one, Text)]
        for one in part.renderables:
            yield from _from_screen(one, texts[0] if texts else "")
    elif isinstance(part, ScreenTable) and not _is_map(part):
        header = [_plain(column.header) for column in part.columns]
        columns = [list(map(_plain, column.cells)) for column in part.columns]
        notes = tuple(_plain(part.caption).splitlines()) if part.caption else ()
        yield Table.plain(_plain(part.title or "") or title, header, zip(*columns, strict=True), notes)


def _is_map(table: Any) -> bool:
    """Tell whether a table is a map of layers and heads."""
    return len(table.columns) > 1 and _plain(table.columns[1].header).strip() == "h0"


def _plain(text: object) -> str:
    """Return what is printed of a text, without its style."""
    from rich.text import Text

    return (text.plain if isinstance(text, Text) else str(text)).strip()
