"""From the options of a job to a command: its flags and its help are made of the fields of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from kvsearch.cli.console import Console
from kvsearch.config.options import JobOptions, Option

Checked = TypeVar("Checked", bound=JobOptions)
KINDS = (bool, Path, str)  # what is typed; everything else is read from a text
NUMBERS = {int: "<int>", float: "<float>"}  # as the help has them; read here, so that all mistakes are told at once
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def command(
    options: type[Checked], *, dry_run: bool = False, eager: Mapping[str, Any] | None = None
) -> Callable[[Callable[[Checked, Console], None]], Callable[..., None]]:
    """Make a command of a function that takes checked options and a console.

    Errors become messages and exit codes. `dry_run` says whether the command has this flag; `eager` ones have a
    callback of their own that answers them, before anything else is asked for.
    """

    def decorated(function: Callable[[Checked, Console], None]) -> Callable[..., None]:
        hints = inspect.get_annotations(Console, eval_str=True)
        general = [
            inspect.Parameter(field.name, KEYWORD, default=field.default, annotation=hints[field.name])
            for field in fields(Console)
            if dry_run or field.name != "dry_run"
        ]
        context = inspect.Parameter("typer_context", KEYWORD, annotation=typer.Context)
        answered = {
            name: inspect.Parameter(name, KEYWORD, default=False, annotation=Annotated[bool, about])
            for name, about in (eager or {}).items()
        }
        parameters = [context, *_own(options), *answered.values(), *general]
        numbers = {name: _plain(field.annotation) for name, (field, _) in options.offered().items()}
        negated = [name for name, (_, option) in options.offered().items() if option.negated]

        @functools.wraps(function)
        def wrapped(typer_context: typer.Context, **values: Any) -> None:
            console = Console(**{one.name: values.pop(one.name) for one in general})
            typed: dict[str, Any] = {}
            for name in values.keys() - answered.keys():
                source = typer_context.get_parameter_source(name)
                if source is not None and source.name != "DEFAULT":
                    typed[name] = False if name in negated else _number(values[name], numbers.get(name))
            code = console.run(lambda: function(options.of(**typed), console))
            if code:
                raise typer.Exit(code)

        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapped

    return decorated


def _own(options: type[JobOptions]) -> Iterator[inspect.Parameter]:
    """The options of the job, what is given by its place first."""
    offered = options.offered()
    for name in sorted(offered, key=lambda name: not offered[name][1].argument):
        field, option = offered[name]
        kind = _kind(field, option)
        required = field.is_required() and options.recipes is None  # else a recipe may have it
        given = typer.Argument if option.argument else typer.Option
        flags = [] if option.argument else [option.called(name), *([option.short] if option.short else [])]
        about = given(*flags, **_about(field, option))
        annotation = kind if required else kind | None
        default = inspect.Parameter.empty if required else _shown_default(field)
        yield inspect.Parameter(name, KEYWORD, default=default, annotation=Annotated[annotation, about])
    if options.recipes is not None:
        yield _recipe(options)


def _recipe(options: type[JobOptions]) -> inspect.Parameter:
    folder = ", or a shipped one by name (see `kvsearch recipes`)" if options.recipes else ""
    about = typer.Option(
        "--recipe",
        metavar="FILE",
        help=f"A YAML file of these options{folder}, or the config.json of a run; what is typed wins over it.",
        show_default=False,
    )
    return inspect.Parameter("recipe", KEYWORD, default=None, annotation=Annotated[str | None, about])


def _kind(field: FieldInfo, option: Option) -> Any:
    """What the command line reads for a field."""
    plain = _plain(field.annotation)
    if option.repeated:
        inner = next((_plain(item) for item in get_args(plain) if item is not Ellipsis), str)
        return list[inner if inner in KINDS else str]  # type: ignore[misc]
    return plain if plain in KINDS else str


def _number(value: Any, kind: Any) -> Any:
    """Return the number that was typed, or the text if it is none, for the model to refuse."""
    with suppress(ValueError):
        return kind(value) if kind in NUMBERS else value
    return value


def _plain(annotation: Any) -> Any:
    """A type without None and without what is annotated to it."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        (annotation, *_) = [item for item in get_args(annotation) if item is not NoneType]
        return _plain(annotation)
    return annotation


def _shown_default(field: FieldInfo) -> Any:
    """The default as the help shows it; None where it is no plain value."""
    plain = not field.is_required() and isinstance(field.default, (*KINDS, *NUMBERS))
    return field.default if plain else None


def _about(field: FieldInfo, option: Option) -> dict[str, Any]:
    """The keyword arguments of `typer.Option` or `typer.Argument`."""
    plain = _shown_default(field)
    shown = option.shown or (plain is not None and not isinstance(plain, bool))
    about: dict[str, Any] = {"help": option.help, "show_default": shown}
    more = {"metavar": option.metavar or NUMBERS.get(_plain(field.annotation)), "rich_help_panel": option.panel}
    return about | {key: value for key, value in more.items() if value is not None}
