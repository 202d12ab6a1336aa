"""From what was opened to one HTML file, with no script, style, font or picture from anywhere else.

Results are grouped by the content of models, never mixed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from markupsafe import Markup
from pydantic import ValidationError

from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_target, read_bytes
from kvsearch.core.printed import escape_invisible, format_command_line
from kvsearch.evaluation.names import METHODS
from kvsearch.plan import ModelFingerprint, Plan, Profile, ProfileMetadata
from kvsearch.policies.registry import BUILT_IN, describe_policy
from kvsearch.report.artifacts import LoadedArtifact
from kvsearch.report.draw import COLOURS, DRAW_SETTINGS, GRID_COLOUR, INK, MUTED, PLATE, WIDTH, draw
from kvsearch.report.figures import Figure
from kvsearch.report.selections import report_ahead_words, score_facts
from kvsearch.report.table import Table, to_csv
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.results.selection import SelectionResult, SelectionsResult

if TYPE_CHECKING:
    from jinja2 import Template

Sheet = dict[str, Any]
PageGroup = tuple[str, str, list[Sheet]]  # the name of a model, which it is by content, and all that is about it
GENERATOR = "kvsearch report"
MAX_FACT_LENGTH = 400  # letters of a fact
LINK_SAFE = ",;:/?@=+$!*()[]{}|^"  # in a data link, beside letters and digits
SANS: Final = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "mathtext.fontset": "dejavusans"}
ENLARGED: Final = 1.15  # pixels per point
NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# lines and letters in black, lines of the grid, what is behind letters: as the page has them, in the light or dark
THEMED: Final = {
    "#000000": "currentColor", GRID_COLOUR.lower(): "var(--faint)", PLATE.lower(): "var(--page)",
    MUTED.lower(): "var(--muted)",
    **{colour.lower(): f"var(--c{at})" for at, colour in enumerate(COLOURS) if colour != INK},
}  # fmt: skip
_STYLE = re.compile(r' style="([^"]*)"')
_GROUP = re.compile(r' id="[\w.]+_\d+"')  # a name that nothing refers to


def group_by_model(opened: Sequence[LoadedArtifact]) -> list[PageGroup]:
    """Group opened artifacts by model for the page: the model's description, then its artifacts in the given order.

    A model is known by the hashes of its configuration and weights. What does not say them is grouped by the name.
    """
    groups: dict[object, PageGroup] = {}
    for artifact in opened:
        content: object = artifact.model
        name = artifact.model or "no model"
        detail = "the weights are not known" if artifact.model else ""
        if (model := find_fingerprint(artifact)) is not None:
            content = (model.config_sha256, model.weights_sha256)
            name = model.name
            shape = f"{model.layers} layers x {model.kv_heads} kv heads x {model.head_dim}"
            hashes = f"config {model.config_sha256[:12]}, weights {model.weights_sha256[:12]}"
            revision = f", revision {model.revision}" if model.revision else ""
            detail = f"{model.model_type}, {shape}, {hashes}{revision}"
        groups.setdefault(content, (name, detail, []))[2].append(make_sheet(artifact))
    return list(groups.values())


def make_sheet(opened: LoadedArtifact) -> Sheet:
    """Return what the template has of one thing that was opened, and of what is kept with it, by name.

    That is the answer in a sentence, lines, figures and tables, the commands and facts by which all was made, `choices`
    by size where something was chosen, and the `names` of all that is compared.
    """
    content = opened.content
    choices: Sequence[SelectionResult] = ()
    names: list[str] = []
    inner = [artifact for artifact in opened.inner if artifact.kind != "plan" and opened.kind != "run"]
    lines = [part for part in opened.shown if isinstance(part, str) and part != opened.headline]
    if isinstance(content, EvaluationResult):
        names = [method.name for block in content.blocks for method in block.methods]
    elif isinstance(content, SelectionResult | SelectionsResult):
        choices = content.choices
        names = [
            name
            for artifact in choices
            for name in (*artifact.report.scores, *(each.name for each in artifact.chosen.methods))
        ]
        lines = []  # which say what was chosen
    plans = [artifact for artifact in opened.inner if artifact.kind == "plan"]
    return {
        "path": str(opened.path), "kind": opened.kind, "answer": opened.headline, "note": opened.note,
        "lines": [*lines, *(f"{artifact.path.name}: {artifact.headline}" for artifact in inner if artifact.headline)],
        "figures": [*opened.figures, *(figure for part in (*plans, *inner) for figure in _list_inner_figures(part))],
        "tables": [part for artifact in (opened, *inner) for part in artifact.shown if isinstance(part, Table)],
        "commands": [format_command_line(opened.config.command)] if opened.config is not None else [],
        "sources": dict(_list_sources(opened)), "choices": choices, "names": list(dict.fromkeys(names)),
    }  # fmt: skip


def _list_inner_figures(opened: LoadedArtifact) -> Iterator[Figure]:
    """Yield the figures of what is kept with another thing, named by it, too."""
    stem = opened.path.parent.name if opened.kind == "selection" else opened.path.stem
    for figure in (*opened.figures, *(figure for artifact in opened.inner for figure in _list_inner_figures(artifact))):
        yield replace(figure, name=f"{stem}-{figure.name}", title=f"{stem}: {figure.title}")


def find_fingerprint(opened: LoadedArtifact) -> ModelFingerprint | None:
    """Return which model something is about, by content; None if neither it nor its parts say that."""
    content = opened.content
    if isinstance(content, Plan):
        return content.model
    if isinstance(content, Profile):
        return content.metadata.model
    stated = [opened.data]
    if opened.config is not None:
        stated += [opened.config.content, opened.config.execution]
    stated_model = next((model for value in stated for model in _find_fingerprints(value)), None)
    return stated_model or next((model for part in opened.inner if (model := find_fingerprint(part)) is not None), None)


def _find_fingerprints(value: object) -> Iterator[ModelFingerprint]:
    """Yield the models that a JSON object names by content, or one of the objects in it."""
    if not isinstance(value, dict):
        return
    for inner in (value, value.get("model"), value.get("environment")):
        if isinstance(inner, dict) and "weights_sha256" in inner:
            try:
                yield ModelFingerprint.model_validate(inner)
            except ValidationError:
                continue
        elif inner is not value:
            yield from _find_fingerprints(inner)


def _list_sources(opened: LoadedArtifact) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield facts, the resolved configuration of a run and where its results come from."""
    config = opened.config
    for part in opened.shown:
        if isinstance(part, Mapping):
            yield str(part.get("phase", "facts")), _flatten_facts(part)
    if config is not None:
        yield "resolved options", _flatten_facts(config.options)
        yield "what decides the result", _flatten_facts(config.content)
        yield "execution", _flatten_facts(config.execution)
    for name, artifact in [("", opened), *((part.path.name, part) for part in opened.inner)]:
        stated = artifact.content.metadata if isinstance(artifact.content, Profile) else artifact.content
        if isinstance(stated, Plan | ProfileMetadata):
            yield (
                f"provenance{f' of {name}' if name else ''}",
                _flatten_facts(stated.provenance.model_dump(mode="json")),
            )


def _flatten_facts(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of all that is in an object, names of inner ones with dots; long ones are cut."""
    return [
        (name, text if len(text) <= MAX_FACT_LENGTH else f"{text[:MAX_FACT_LENGTH]}…")
        for name, text in _flatten(value, "")
    ]


def _flatten(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) if value else "none"
    else:
        yield name, "none" if value is None or value == {} else str(value)


def render(groups: Sequence[PageGroup]) -> bytes:
    """Return the file; equal content gives equal bytes."""
    style = _read_asset("page.css")
    script = _read_asset("page.js")
    page = _load_template().render(
        generator=GENERATOR, groups=groups,
        style=Markup(style), script=Markup(script),  # ours, without a word of what is reported
        style_hash=_hash(style), script_hash=_hash(script),
    )  # fmt: skip
    return page.encode()


def check_page_target(path: Path, advice: str = "choose another file") -> None:
    """Raise UsageError if a page cannot be written to `path`, or would replace what is no page of ours."""
    check_target(path)
    if path.exists() and f'<meta name="generator" content="{GENERATOR}">'.encode() not in read_bytes(path)[:400]:
        raise UsageError(f"{path} is no report of kvsearch: {advice}")


def make_data_link(text: str) -> str:
    """Return a link that holds a CSV file itself."""
    return f"data:text/csv;charset=utf-8,{quote(text.encode(errors='backslashreplace'), safe=LINK_SAFE)}"


def draw_svg(figure: Figure, anchor: str, width: float = WIDTH) -> Markup:
    """Return a figure, `width` inches wide, as an element of the page in its ink; equal figures give equal markup.

    The page's policy allows no styles but its own, so what matplotlib states as styles becomes attributes.
    """
    import matplotlib

    data = io.StringIO()
    settings = {**DRAW_SETTINGS, **SANS, "svg.fonttype": "none", "svg.hashsalt": anchor}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that a font lacks, which the browser has in another
        picture = draw(figure, titled=False, width=width)
        picture.savefig(data, format="svg", bbox_inches="tight", transparent=True, metadata=NO_METADATA)
    whole = data.getvalue()
    view = whole[whole.index("viewBox=") :].split('"')[1]
    drawing = whole[whole.index("</defs>") + len("</defs>") :]  # the first definitions are a style sheet
    drawing = _GROUP.sub("", _STYLE.sub(_style_to_attributes, drawing))
    for colour, themed in THEMED.items():
        drawing = drawing.replace(f'"{colour}"', f'"{themed}"')
    opening = Markup('<svg viewBox="{}" width="{:.0f}" role="img" aria-label="{}" fill="currentColor">')
    sized = opening.format(view, ENLARGED * float(view.split()[2]), escape_invisible(figure.title))
    return sized + Markup(re.sub(r"\s*\n\s*", " ", drawing))


def _style_to_attributes(style: re.Match[str]) -> str:
    """Return the attributes that say what a style says; the family of letters is that of the page."""
    stated = (part.split(": ", 1) for part in style[1].split("; "))
    return "".join(f' {name}="{value}"' for name, value in stated if name != "font-family")


@cache
def _load_template() -> Template:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def finalize(value: Any) -> Any:
        """Make what nobody can see visible in all that the template prints."""
        return escape_invisible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FunctionLoader(_read_asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
    )
    environment.globals.update(
        ahead_words=report_ahead_words, score_facts=score_facts, methods=METHODS, policies=BUILT_IN,
        describe=describe_policy, draw=draw_svg, link=make_data_link, csv=to_csv,
    )  # fmt: skip
    return environment.get_template("page.html")


def _read_asset(name: str) -> str:
    return (files("kvsearch.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
