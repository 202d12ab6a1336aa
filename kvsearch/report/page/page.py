"""From what a report has to the bytes of one HTML file: no script, style, font or picture from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from markupsafe import Markup

from kvsearch.core.printed import visible
from kvsearch.report.figures.data import Figure
from kvsearch.report.figures.draw import GRID, PLATE, SETTINGS, draw
from kvsearch.report.table import Table, csv

if TYPE_CHECKING:
    from jinja2 import Template

GENERATOR = "kvsearch report"
LONG = 24  # rows; a longer table has a frame of its own, in which it is moved up and down
LINK_SAFE = ",;:/?@=+$!*()[]{}|^"  # in a data link, beside letters and digits
SANS: Final = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "mathtext.fontset": "dejavusans"}
ENLARGED: Final = 1.15  # pixels per point
NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# lines and letters in black, lines of the grid, what is behind letters: as the page has them, in the light or dark
THEMED: Final = {"#000000": "currentColor", GRID.lower(): "var(--faint)", PLATE.lower(): "var(--page)"}
_STYLE = re.compile(r' style="([^"]*)"')
_GROUP = re.compile(r' id="[\w.]+_\d+"')  # a name that nothing refers to


@dataclass(frozen=True)
class Sheet:
    """One run, plan or profile: the answer in a sentence, lines, figures and tables, and how all that was made.

    `sources` are facts under headings: the resolved configuration, the provenance of plans.
    """

    path: str
    kind: str
    answer: str
    note: str | None = None
    lines: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    commands: Sequence[str] = ()
    sources: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelGroup:
    """All that is about one model; `detail` says which it is, by content."""

    name: str
    detail: str
    sheets: list[Sheet]


def render(groups: Sequence[ModelGroup], title: str, about: str) -> bytes:
    """Return the file; equal content gives equal bytes."""
    number = 0
    shown: list[dict[str, Any]] = []
    for group in groups:
        sheets = []
        for sheet in group.sheets:
            number += 1
            sheets.append(_sheet(sheet, f"r{number}"))
        shown.append({"name": group.name, "detail": group.detail, "sheets": sheets})
    style = _text("page.css")
    script = _text("page.js")
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


def data_link(text: str) -> str:
    """Return a link that holds a CSV file itself."""
    return f"data:text/csv;charset=utf-8,{quote(text.encode(errors='backslashreplace'), safe=LINK_SAFE)}"


def draw_svg(figure: Figure, anchor: str) -> Markup:
    """Return a figure as an element of the page, in its ink; equal figures at an `anchor` give equal markup.

    The page's policy allows no styles but its own, so what matplotlib states as styles becomes attributes.
    """
    import matplotlib

    data = io.StringIO()
    settings = {**SETTINGS, **SANS, "svg.fonttype": "none", "svg.hashsalt": anchor}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that a font lacks, which the browser has in another
        picture = draw(figure, titled=False)
        picture.savefig(data, format="svg", bbox_inches="tight", transparent=True, metadata=NO_METADATA)
    whole = data.getvalue()
    view = whole[whole.index("viewBox=") :].split('"')[1]
    width = ENLARGED * float(view.split()[2])
    drawing = whole[whole.index("</defs>") + len("</defs>") :]  # the first definitions are a style sheet
    drawing = _GROUP.sub("", _STYLE.sub(_attributes, drawing))
    for colour, themed in THEMED.items():
        drawing = drawing.replace(f'"{colour}"', f'"{themed}"')
    opening = Markup('<svg viewBox="{}" width="{:.0f}" role="img" aria-label="{}" fill="currentColor">')
    return opening.format(view, width, visible(figure.title)) + Markup(re.sub(r"\s*\n\s*", " ", drawing))


def _attributes(style: re.Match[str]) -> str:
    """Return the attributes that say what a style says; the family of letters is that of the page."""
    stated = (part.split(": ", 1) for part in style[1].split("; "))
    return "".join(f' {name}="{value}"' for name, value in stated if name != "font-family")


def _sheet(sheet: Sheet, anchor: str) -> dict[str, Any]:
    """Return what the template needs of a sheet."""
    figures = [
        {**vars(figure), "anchor": f"{anchor}-f{at}", "drawing": draw_svg(figure, f"{anchor}-f{at}"),
         "link": data_link(figure.csv())}
        for at, figure in enumerate(sheet.figures, 1)
    ]  # fmt: skip
    tables = [
        {
            **vars(table),
            "name": f"table-{anchor}-{at}",
            "is_long": len(table.rows) > LONG,
            "link": data_link(csv(table)),
        }
        for at, table in enumerate(sheet.tables, 1)
    ]
    return {**vars(sheet), "anchor": anchor, "figures": figures, "tables": tables, "sources": sheet.sources.items()}


@cache
def _template() -> Template:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def finalize(value: Any) -> Any:
        """Make what nobody can see visible in all that the template prints."""
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FunctionLoader(_text), autoescape=True, undefined=StrictUndefined, finalize=finalize, trim_blocks=True
    )
    return environment.get_template("page.html")


def _text(name: str) -> str:
    return (files("kvsearch.report.page") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
