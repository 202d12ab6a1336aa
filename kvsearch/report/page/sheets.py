"""From what was opened to what is on the page: grouped by the content of models, never mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvsearch.plan import ModelFingerprint, Plan, Profile
from kvsearch.printed import command_line
from kvsearch.report.figures.make import figures_of
from kvsearch.report.numbers import counted
from kvsearch.report.page import told_files, told_runs
from kvsearch.report.page.page import Group, Sheet
from kvsearch.report.page.screens import tables_of
from kvsearch.report.page.story import Story
from kvsearch.report.reader import Kind, Opened

if TYPE_CHECKING:
    from kvsearch.report.table import Table

STORIES: Mapping[Kind, Callable[[Any], Story]] = {
    "plan": told_files.plan_story, "profile": told_files.profile_story, "evaluation": told_runs.evaluation_story,
    "perplexity": told_runs.perplexity_story, "headroom": told_runs.headroom_story,
    "speed": told_runs.speed_story,
    "validation": told_runs.validation_story, "selection": told_runs.selection_story, "run": told_runs.run_story,
    "search": told_runs.search_story, "replies": told_runs.replies_story,
}  # fmt: skip
MOST, LONGEST = 200, 400  # facts of a source, letters of one of them


def groups_of(opened: Sequence[Opened]) -> list[Group]:
    """Return a group per model, in the order of what was opened.

    A model is known by the hashes of its configuration and weights. What does not say them is grouped by the name.
    """
    found: dict[tuple[str, ...], list[Sheet]] = {}
    named: dict[tuple[str, ...], tuple[str, str]] = {}
    for one in opened:
        model = fingerprint_of(one)
        if model is None:
            name = one.model or "no model"
            key: tuple[str, ...] = (name,)
            named[key] = name, "the weights are not known" if one.model else ""
        else:
            key = model.config_sha256, model.weights_sha256
            named.setdefault(key, (model.name, _detail(model)))
        found.setdefault(key, []).append(sheet_of(one))
    return [Group(*named[key], sheets) for key, sheets in found.items()]


def sheet_of(opened: Opened) -> Sheet:
    """Return what is on the page of one thing that was opened."""
    story = _story(opened)
    parts = [part for part in opened.parts if part.kind != "plan"]
    remarks = [f"{part.path.name}: {told}" for part in parts if (told := _story(part).answer)]
    return Sheet(
        path=str(opened.path), kind=opened.kind, asked=story.asked, answer=story.answer, note=opened.note,
        remarks=[*story.remarks, *remarks], figures=figures_of(opened), tables=_tables([opened, *parts]),
        commands=[command_line(opened.config.command)] if opened.config is not None else [],
        sources=dict(_sources(opened)),
    )  # fmt: skip


def about(groups: Sequence[Group]) -> str:
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
    return own or next((model for part in opened.parts if (model := fingerprint_of(part)) is not None), None)


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


def _detail(model: ModelFingerprint) -> str:
    shape = f"{model.layers} layers x {model.kv_heads} kv heads x {model.head_dim}"
    hashes = f"config {model.config_sha256[:12]}, weights {model.weights_sha256[:12]}"
    return ", ".join([model.model_type, shape, hashes, *([f"revision {model.revision}"] if model.revision else [])])


def _story(opened: Opened) -> Story:
    if opened.content is None or opened.kind not in STORIES:
        return Story("")
    return STORIES[opened.kind](opened.content)


def _tables(opened: Sequence[Opened]) -> list[Table]:
    return [table for one in opened for table in tables_of(one)]


def _sources(opened: Opened) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the resolved configuration of a run and where its results come from."""
    config, content = opened.config, opened.content
    if config is not None:
        yield "resolved options", _facts(config.options)
        yield "what decides the result", _facts(config.content)
        yield "execution", _facts(config.execution)
    for name, one in [("", opened), *((part.path.name, part) for part in opened.parts)]:
        content = one.content
        origin = content.provenance if isinstance(content, Plan) else (
            content.metadata.provenance if isinstance(content, Profile) else None
        )  # fmt: skip
        if origin is not None:
            yield f"provenance{f' of {name}' if name else ''}", _facts(origin.model_dump(mode="json"))
    if isinstance(opened.data, dict) and isinstance(environment := opened.data.get("environment"), dict):
        yield "environment", _facts(environment)


def _facts(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of all that is in an object, names of inner ones with dots; long ones are cut."""
    found = list(_flat(value, ""))
    more = [("…", f"and {len(found) - MOST} more, in the file itself")] * (len(found) > MOST)
    return [(name, text if len(text) <= LONGEST else f"{text[:LONGEST]}…") for name, text in found[:MOST]] + more


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) if value else "none"
    else:
        yield name, "none" if value is None or value == {} else str(value)
