"""From what was opened to what is on the page: grouped by the content of models, never mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from kvsearch.core.printed import command_line
from kvsearch.plan import ModelFingerprint, Plan, Profile, ProfileMetadata
from kvsearch.report.artifacts import Opened
from kvsearch.report.figures.data import Figure
from kvsearch.report.numbers import counted
from kvsearch.report.page.page import ModelGroup, Sheet
from kvsearch.report.table import Table

LONGEST = 400  # letters of a fact


def groups_of(opened: Sequence[Opened]) -> list[ModelGroup]:
    """Return a group per model, in the order of what was opened.

    A model is known by the hashes of its configuration and weights. What does not say them is grouped by the name.
    """
    groups: dict[object, ModelGroup] = {}
    for one in opened:
        model = fingerprint_of(one)
        if model is None:
            content: object = one.model
            group = ModelGroup(one.model or "no model", "the weights are not known" if one.model else "", [])
        else:
            content = (model.config_sha256, model.weights_sha256)
            shape = f"{model.layers} layers x {model.kv_heads} kv heads x {model.head_dim}"
            hashes = f"config {model.config_sha256[:12]}, weights {model.weights_sha256[:12]}"
            revision = f", revision {model.revision}" if model.revision else ""
            group = ModelGroup(model.name, f"{model.model_type}, {shape}, {hashes}{revision}", [])
        groups.setdefault(content, group).sheets.append(sheet_of(one))
    return list(groups.values())


def sheet_of(opened: Opened) -> Sheet:
    """Return what is on the page of one thing that was opened, and of what is kept with it."""
    inner = [one for one in opened.inner if one.kind != "plan"]
    shown = [part for one in (opened, *inner) for part in one.shown]
    lines = [part for part in opened.shown if isinstance(part, str) and part != opened.headline]
    figures = [*opened.figures, *(figure for one in opened.inner for figure in _inner_figures(one))]
    return Sheet(
        path=str(opened.path), kind=opened.kind, answer=opened.headline, note=opened.note,
        lines=[*lines, *(f"{one.path.name}: {one.headline}" for one in inner if one.headline)], figures=figures,
        tables=[part for part in shown if isinstance(part, Table)],
        commands=[command_line(opened.config.command)] if opened.config is not None else [],
        sources=dict(_sources(opened)),
    )  # fmt: skip


def _inner_figures(opened: Opened) -> Iterator[Figure]:
    """Yield the figures of what is kept with another thing, named by it, too."""
    stem = opened.path.parent.name if opened.kind == "selection" else opened.path.stem
    for figure in (*opened.figures, *(figure for one in opened.inner for figure in _inner_figures(one))):
        yield replace(figure, name=f"{stem}-{figure.name}")


def about(groups: Sequence[ModelGroup]) -> str:
    """Say what is in a report."""
    sheets = sum(len(group.sheets) for group in groups)
    models = f" of {counted(len(groups), 'model')}" if len(groups) > 1 else f" of {groups[0].name}"
    return f"{counted(sheets, 'result')}{models}"


def fingerprint_of(opened: Opened) -> ModelFingerprint | None:
    """Return which model something is about, by content; None if neither it nor its parts say that."""
    content = opened.content
    if isinstance(content, Plan):
        return content.model
    if isinstance(content, Profile):
        return content.metadata.model
    stated = [opened.data]
    if opened.config is not None:
        stated += [opened.config.content, opened.config.execution]
    own = next((model for value in stated for model in _fingerprints(value)), None)
    return own or next((model for part in opened.inner if (model := fingerprint_of(part)) is not None), None)


def _fingerprints(value: object) -> Iterator[ModelFingerprint]:
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
            yield from _fingerprints(inner)


def _sources(opened: Opened) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield facts, the resolved configuration of a run and where its results come from."""
    config = opened.config
    for part in opened.shown:
        if isinstance(part, Mapping):
            yield str(part.get("phase", "facts")), _facts(part)
    if config is not None:
        yield "resolved options", _facts(config.options)
        yield "what decides the result", _facts(config.content)
        yield "execution", _facts(config.execution)
    for name, one in [("", opened), *((part.path.name, part) for part in opened.inner)]:
        stated = one.content.metadata if isinstance(one.content, Profile) else one.content
        if isinstance(stated, Plan | ProfileMetadata):
            yield f"provenance{f' of {name}' if name else ''}", _facts(stated.provenance.model_dump(mode="json"))
    if isinstance(opened.data, dict) and isinstance(environment := opened.data.get("environment"), dict):
        yield "environment", _facts(environment)


def _facts(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of all that is in an object, names of inner ones with dots; long ones are cut."""
    return [(name, text if len(text) <= LONGEST else f"{text[:LONGEST]}…") for name, text in _flat(value, "")]


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) if value else "none"
    else:
        yield name, "none" if value is None or value == {} else str(value)
