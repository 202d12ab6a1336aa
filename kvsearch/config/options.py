"""Options, each declared once: a field of a job's model, with its help text.

The flags of the command line, the keys of recipes, the "options" of a run's config.json and the keyword arguments of
the Python API are all made of these fields. Defaults come first, then the recipe, then what was typed or passed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Le
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from kvsearch.config.recipes import find_recipe, read_recipe
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Record, ScalarField, refuse
from kvsearch.core.limits import MOST_ENTRIES, MOST_NUMBER
from kvsearch.core.parsing import MISSING, is_text, list_problems, list_validation_problems

FIRST, QUESTIONS, SIZE, RESULT, RULE, MACHINE = range(6)  # in the short help


@dataclass(frozen=True)
class Option:
    """How a field is offered on the command line.

    Args:
        help: one or two sentences.
        essential: its place in the short help, such as QUESTIONS; None: it is in the full help only.
        flag: default: the name of the field, as in --max-length.
        short: a short flag, as in -o.
        metavar: what stands for the value in the help.
        panel: the heading of the help that it is under.
        shown: the default in words; None: the default itself, or nothing where that is None or False.
        argument: given by its place, without a flag.
        negated: the flag turns the field off, as --no-gap does.
        repeated: every value has a flag of its own; else several are separated by commas.
        recorded: whether it is part of the configuration of a run, and may be in a recipe.
        locked: whether it is a directory that the job writes into.
        completes: the names that may be typed for it, as "module:attribute"; a function there returns them.
    """

    help: str
    essential: int | None = None
    flag: str | None = None
    short: str | None = None
    metavar: str | None = None
    panel: str | None = None
    shown: str | None = None
    argument: bool = False
    negated: bool = False
    repeated: bool = False
    recorded: bool = True
    locked: bool = False
    completes: str = ""

    def called(self, name: str) -> str:
        """Return what the field `name` is called on the command line."""
        return name.upper() if self.argument else self.flag or f"--{name.replace('_', '-')}"


BOUNDS = ("ge", "gt", "le", "lt", "min_length", "strict", "allow_inf_nan")  # of a value, as pydantic calls them


def option(default: Any, about: str | Option, essential: int | None = None, **details: Any) -> Any:
    """Return a field of options with its default; `...`: it has to be given.

    `about` is the help, of which `essential` and `details` are the rest of an `Option`; or an `Option` that several
    fields have, but for the `details`. Among these may be `BOUNDS` of the value.
    """
    bounds = {name: details.pop(name) for name in BOUNDS if name in details}
    field = Field(default, **bounds)
    field.metadata.append(
        replace(about, **details) if isinstance(about, Option) else Option(about, essential, **details)
    )
    return field


class JobOptions(Record):
    """All options of a job, checked as a whole.

    `job` is what its runs are called and `recipes` whether it takes a recipe. A field without an `Option` is not
    offered on the command line. A class may have a `panel` for the fields that it brings. Of `alternatives` one is
    given: it takes the place of another that a recipe states.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    job: ClassVar[str] = "this command"
    recipes: ClassVar[bool] = False
    alternatives: ClassVar[tuple[str, ...]] = ()

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories that the job writes into: it has their locks from its beginning to its end."""
        places = [getattr(self, name) for name, (_, option) in self.offered().items() if option.locked]
        return tuple(place for place in places if place is not None)

    def check_model(self) -> None:
        """Raise the error of a model that cannot be loaded, where the job has one that is named."""

    def close(self) -> None:
        """Give back what the options have opened for the job."""

    @field_validator("*")
    @classmethod
    def _within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse whole numbers above all meaning, where a field states no limit, and what is not UTF-8."""
        field = cls.model_fields[info.field_name or ""]
        most = next((limit.le for limit in field.metadata if isinstance(limit, Le)), MOST_ENTRIES)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int) and abs(item) > most:  # type: ignore[operator]
                raise PydanticCustomError("limit", "must be at most {most}", {"most": most})
            if isinstance(item, str) and not is_text(item):
                raise PydanticCustomError("limit", "must be text, in UTF-8")
        return value

    @model_validator(mode="after")
    def _are_alternatives(self) -> Self:
        """Refuse several of the `alternatives`, and a budget twice."""
        given = [name for name in self.alternatives if getattr(self, name) not in (None, False)]
        budgets = getattr(self, "budgets", None) if "budgets" in self.alternatives else None
        if len(given) > 1:
            other = self.offered()[given[0]][1].called(given[0])
            refuse([((given[1],), f"cannot be given with {other}: leave one of them out")])
        if len(set(budgets or ())) < len(budgets or ()):
            refuse([(("budgets",), "has a budget twice: give each once")])
        return self

    @classmethod
    def offered(cls) -> dict[str, tuple[FieldInfo, Option]]:
        """Return the fields that are options, by name: those of the job first, then those it shares with others."""
        own = {model: inspect.get_annotations(model) for model in cls.__mro__}
        offered = {}
        for name in sorted(cls.model_fields, key=lambda name: [name in stated for stated in own.values()].index(True)):
            # a class that narrows a field of another leaves it offered as that says
            stated = [
                item
                for model in cls.__mro__
                if issubclass(model, Record) and name in model.model_fields
                for item in model.model_fields[name].metadata
                if isinstance(item, Option)
            ]
            if stated:
                panel = next(vars(model).get("panel") for model in reversed(own) if name in own[model])
                offered[name] = (cls.model_fields[name], replace(stated[0], panel=stated[0].panel or panel))
        return offered

    @classmethod
    def variants(cls) -> Mapping[str, type[JobOptions]]:
        """Return the models that `method` chooses between, by its value; none where there is one."""
        return {}

    @classmethod
    def of(cls, recipe: str | Path | None = None, **given: Any) -> Self:
        """Merge defaults, a recipe and what is `given`; None is not given.

        Args:
            recipe: a YAML file, the config.json of a run, or the name of a shipped recipe.
            given: options by the names of their fields, as typed or as Python values.

        Raises:
            UsageError: an unreadable recipe, or options that are unknown, out of range or do not go together; all of
                the recipe's problems, or all of what is given, in one message.
        """
        path = None if recipe is None else find_recipe(str(recipe), cls.job)
        stated = {} if path is None else read_recipe(path, cls.job)
        typed = {name: value for name, value in given.items() if value is not None}
        model = cls.chosen(stated, typed, path)
        unfit = [name for name, (_, option) in model.offered().items() if name in stated and not option.recorded]
        if unfit:
            raise UsageError(f"{path}: {', '.join(unfit)} cannot be in a recipe: give it with the command")
        try:
            return model.model_validate(model.merged(dict(stated), typed))
        except (ValidationError, UsageError) as error:
            if path is not None:
                model._check_recipe(path, stated, typed)
            if isinstance(error, UsageError):
                raise
            raise model._refusal(error) from error

    @classmethod
    def _check_recipe(cls, path: Path, stated: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Raise UsageError if what a recipe has `stated` is refused with no more than what has to be `given`."""
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        try:
            cls.model_validate(cls.merged(dict(stated), {name: given[name] for name in needed & given.keys()}))
        except ValidationError as error:
            raise UsageError(list_problems(list_validation_problems(error), str(path))) from error
        except UsageError as error:
            raise type(error)(f"{path}: {error}") from error

    @classmethod
    def _refusal(cls, error: ValidationError) -> UsageError:
        """Return what is wrong with what was given, with flags in place of the names of fields."""
        offered = cls.offered()
        problems = []
        for problem in list_validation_problems(error):
            name = re.split(r"[.:]", problem, maxsplit=1)[0]
            if name in offered:
                option = offered[name][1]
                problem = option.called(name) + problem[len(name) :]
                if problem.endswith(MISSING):
                    problem = f"{option.called(name)} is missing: {option.help[0].lower()}{option.help[1:].rstrip('.')}"
            problems.append(problem)
        return UsageError(problems[0] if len(problems) == 1 else list_problems(problems, "what was given"))

    @classmethod
    def chosen(cls, stated: Mapping[str, Any], given: Mapping[str, Any], path: Path | None) -> type[Self]:  # noqa: ARG003
        """Return the model to check what a recipe has `stated` and what was `given`; a job may have several."""
        return cls

    @classmethod
    def merged(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a recipe has `stated` with what was `given` over it."""
        return {**one_of(stated, given, cls.alternatives), **given}

    def recorded(self) -> dict[str, Any]:
        """Return what config.json has as "options", to be given back as a recipe: from any folder."""
        left_out = {name for name, (_, option) in self.offered().items() if not option.recorded}
        recorded = self.model_dump(mode="json", exclude=left_out, exclude_none=True)
        return {name: value if name == "model" else _from_root(value) for name, value in recorded.items()}


class Seeded(JobOptions):
    """The seed of everything random."""

    seed: int = option(0, "Seed of everything random.", panel="Options", ge=0, le=MOST_NUMBER)


# what may be the path of a file: after the kind of a task, or a whole value with a slash or a point
_PATH = re.compile(r"(?<=jsonl:)[^+]+|(?<=ppl:)[^+]+|^[^+:=,]*[/.][^+:=,]*$")


def _from_root(value: Any) -> Any:
    """Return the value of an option with absolute paths in place of those of files that are there."""
    if isinstance(value, list):
        return list(map(_from_root, value))
    if isinstance(value, str):
        return _PATH.sub(lambda path: str(Path(path[0]).absolute()) if Path(path[0]).exists() else path[0], value)
    return value


def parse_setting(text: str, flag: str = "--set") -> tuple[str, bool | int | float | str]:
    """Split "key=value" and read the value as true/false, a number, or a word; `flag` is where it was typed."""
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise UsageError(f"{flag} {text!r} is not of the form key=value")
    value = value.strip()
    if value.lower() in ("true", "false"):
        return key.strip(), value.lower() == "true"
    for read in (int, float):
        try:
            return key.strip(), read(value)
        except ValueError:
            continue
    return key.strip(), value


def _listed(value: object) -> object:
    """Read names or numbers as they are typed, "a,b" or 64, as a list."""
    if not isinstance(value, str):
        return [value] if isinstance(value, int) else value
    items = [item.strip() for item in value.split(",")]
    if not all(items):
        raise ValueError(f"takes values with commas between them, got {value!r}")
    return [int(item) if item.isdecimal() else item for item in items]


def joined_by(sign: str) -> BeforeValidator:
    """Return a validator that makes one text, as it is typed, of a number or of several values."""

    def join(value: object) -> object:
        return sign.join(map(str, value if isinstance(value, list | tuple) else [value]))

    return BeforeValidator(join)


def _settings(value: object) -> object:
    """Read settings as they are typed, ["window=16"], as a mapping."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        try:
            return dict(map(parse_setting, value))
        except UsageError as error:
            raise ValueError(str(error)) from error
    return value


def with_params(stated: dict[str, Any], given: Mapping[str, Any], own_policy: str | None) -> dict[str, Any]:
    """Return what a recipe has `stated` with what was `given` over it, parameters one by one.

    Those of the recipe are of `own_policy`, and left out under another one; None: they are of all policies.
    """
    both = {**stated, **given}
    if "params" not in both:
        return both
    typed = given.get("params", {})
    changed = dict(typed) if isinstance(typed, Mapping) else dict(map(parse_setting, typed))
    own = stated.get("params", {}) if own_policy is None or given.get("policy", own_policy) == own_policy else {}
    with suppress(ValueError):  # what is wrong in the recipe is left for the model to refuse
        own = _settings(own)
    both["params"] = {**own, **changed} if isinstance(own, dict) else own
    return both


def one_of(stated: dict[str, Any], given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a recipe has `stated` but for what a `given` option of these names, of which one holds, replaces."""
    if not any(name in given for name in names):
        return stated
    return {name: value for name, value in stated.items() if name not in names}


Listed = BeforeValidator(_listed)
Specs = Annotated[str, joined_by("+")]  # of tasks
Commas = Annotated[str, joined_by(",")]
Names = Annotated[tuple[str, ...], Listed]
WholeNumbers = Annotated[tuple[Annotated[int, Field(strict=True)], ...], Listed]
Repeated = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
Params = Annotated[dict[str, ScalarField], BeforeValidator(_settings)]
