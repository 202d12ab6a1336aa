"""From what a report has to the bytes of one HTML file: no script, style, font or picture from anywhere else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from kvsearch.printed import visible
from kvsearch.report.figures.data import Body, CategoryMap, Figure, HeatMap, Lines
from kvsearch.report.page.categories import category_map
from kvsearch.report.page.heat import heat_map
from kvsearch.report.page.intervals import intervals
from kvsearch.report.page.lines import Key, lines
from kvsearch.report.page.markup import data_link
from kvsearch.report.page.palette import style_sheet
from kvsearch.report.page.tables import PageTable, page_table
from kvsearch.report.table import Table

if TYPE_CHECKING:
    from jinja2 import Template

GENERATOR = "kvsearch report"


@dataclass(frozen=True)
class Drawn:
    """A figure as the page has it; `link` holds its CSV."""

    anchor: str
    name: str
    title: str
    caption: str
    drawing: Markup
    keys: list[Key]
    link: str


@dataclass(frozen=True)
class Sheet:
    """One run, plan or profile: what was asked, the answer, figures and tables, and how all that was made.

    `sources` are facts under headings: the resolved configuration, the provenance of plans.
    """

    path: str
    kind: str
    asked: str
    answer: str
    note: str | None = None
    remarks: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    commands: Sequence[str] = ()
    sources: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """All that is about one model; `detail` says which it is, by content."""

    name: str
    detail: str
    sheets: Sequence[Sheet]


def render(groups: Sequence[Group], title: str, about: str) -> bytes:
    """Return the file; equal content gives equal bytes."""
    number = 0
    shown: list[dict[str, Any]] = []
    for group in groups:
        sheets = []
        for sheet in group.sheets:
            number += 1
            sheets.append(_sheet(sheet, f"r{number}"))
        shown.append({"name": group.name, "detail": group.detail, "sheets": sheets})
    style, script = style_sheet(_text("page.css")), _text("page.js")
    page = _template().render(
        generator=GENERATOR, title=title, about=about, groups=shown,
        contents=[sheet for group in shown for sheet in group["sheets"]],
        style=Markup(style), script=Markup(script),  # ours, without a word of what is reported
        style_hash=_hash(style), script_hash=_hash(script),
    )  # fmt: skip
    return page.encode()


def is_ours(data: bytes) -> bool:
    """Tell whether a file is a page that this wrote, by its first bytes."""
    return f'<meta name="generator" content="{GENERATOR}">'.encode() in data[:400]


def _sheet(sheet: Sheet, anchor: str) -> dict[str, Any]:
    """Return what the template needs of a sheet."""
    figures = [_drawn(one, f"{anchor}-f{at}") for at, one in enumerate(sheet.figures, 1)]
    tables: list[PageTable] = [page_table(one, f"table-{anchor}-{at}") for at, one in enumerate(sheet.tables, 1)]
    return {**sheet.__dict__, "anchor": anchor, "figures": figures, "tables": tables, "sources": sheet.sources.items()}


def _drawn(figure: Figure, anchor: str) -> Drawn:
    """Draw a figure."""
    drawing, keys = _drawing(figure.body)
    return Drawn(anchor, figure.name, figure.title, figure.caption, drawing, keys, data_link(figure.csv()))


def _drawing(body: Body) -> tuple[Markup, list[Key]]:
    """Return a drawing and its legend."""
    if isinstance(body, HeatMap):
        return heat_map(body), []
    if isinstance(body, CategoryMap):
        return category_map(body)
    return lines(body) if isinstance(body, Lines) else (intervals(body), [])


@cache
def _template() -> Template:
    from jinja2 import BaseLoader, Environment, StrictUndefined

    class Packaged(BaseLoader):
        def get_source(self, environment: Environment, template: str) -> tuple[str, str, None]:  # noqa: ARG002
            return _text(template), template, None

    made = Environment(
        loader=Packaged(), autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True
    )
    return made.get_template("page.html")


def _finalize(value: Any) -> Any:
    """Make what nobody can see visible in all that the template prints."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _text(name: str) -> str:
    return (files("kvsearch.report.page") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
