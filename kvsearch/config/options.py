"""Options, each declared once: a field of a job's model, with its help text.

The flags of the command line, the keys of recipes, the "options" of a run's config.json and the keyword arguments of
the Python API are all made of these fields. Defaults come first, then the recipe, then what was typed or passed.
"""

from __future__ import annotations

import inspect
import re
import warnings
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
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.fields import COMPLETE, Record, ScalarField, refuse
from kvsearch.core.limits import MOST_ENTRIES, MOST_NUMBER
from kvsearch.core.parsing import MISSING, is_text, list_problems, list_validation_problems

FIRST, QUESTIONS, SIZE, RESULT, RULE, MACHINE = range(6)  # in the short help


@dataclass(frozen=True)
class Option:
    """Describes a field as an option of the command line.

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

    def format_flag(self, name: str) -> str:
        """Format the flag of the field `name`, or the name of an argument."""
        return name.upper() if self.argument else self.flag or f"--{name.replace('_', '-')}"


BOUNDS = ("ge", "gt", "le", "lt", "min_length", "strict", "allow_inf_nan")  # of a value, as pydantic calls them


def option(default: Any, about: str | Option, essential: int | None = None, **details: Any) -> Any:
    """Declare a field of options with its default; `...`: it is required.

    `about` is the help, and `essential` and `details` are the rest of an `Option`; or it is an `Option` that several
    fields have, but for the `details`. Among these may be `BOUNDS` of the value.
    """
    bounds = {name: details.pop(name) for name in BOUNDS if name in details}
    field = Field(default, **bounds)
    if isinstance(about, Option):
        field.metadata.append(replace(about, essential=about.essential if essential is None else essential, **details))
    else:
        field.metadata.append(Option(about, essential, **details))
    return field


class JobOptions(Record):
    """Base of the options of a job, validated as a whole.

    `job` is the name of its runs, `recipes` tells whether it takes a recipe. A field without an `Option` is not
    offered on the command line, unless the class describes it in `flags`, as it does fields of plain settings. A class
    may have a `panel` for the fields that it brings. Of `alternatives` one is given: it takes the place of another that
    a recipe states. `former` are options of earlier versions, by name: what stands for their value, and the flag to
    give now; `translate_former` takes them.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    job: ClassVar[str] = "this command"
    recipes: ClassVar[bool] = False
    alternatives: ClassVar[tuple[str, ...]] = ()
    former: ClassVar[Mapping[str, tuple[str, str]]] = {}
    flags: ClassVar[Mapping[str, Option]] = {}

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directories that the job writes into, and locks while it runs."""
        places = [getattr(self, name) for name, (_, option) in self.list_options().items() if option.locked]
        return tuple(place for place in places if place is not None)

    @field_validator("*")
    @classmethod
    def _within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject integers above MOST_ENTRIES, unless the field sets a limit, and strings that are not valid UTF-8."""
        field = cls.model_fields[info.field_name or ""]
        maximum = next((limit.le for limit in field.metadata if isinstance(limit, Le)), MOST_ENTRIES)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int) and abs(item) > maximum:  # type: ignore[operator]
                raise PydanticCustomError("limit", "must be at most {most}", {"most": maximum})
            if isinstance(item, str) and not is_text(item):
                raise PydanticCustomError("limit", "must be text, in UTF-8")
        return value

    @model_validator(mode="after")
    def _are_alternatives(self) -> Self:
        """Reject several of the `alternatives`, and repeated budgets."""
        given_names = [name for name in self.alternatives if getattr(self, name) not in (None, False)]
        budgets = getattr(self, "budgets", None) if "budgets" in self.alternatives else None
        if len(given_names) > 1:
            other = self.list_options()[given_names[0]][1].format_flag(given_names[0])
            refuse([((given_names[1],), f"cannot be given with {other}: leave one of them out")])
        if len(set(budgets or ())) < len(budgets or ()):
            refuse([(("budgets",), "has a budget twice: give each once")])
        return self

    @classmethod
    def list_options(cls) -> dict[str, tuple[FieldInfo, Option]]:
        """List the fields that are options, by name: fields of the job first, then shared ones."""
        annotations = {model: inspect.get_annotations(model) for model in cls.__mro__}
        offered = {}
        for name in sorted(
            cls.model_fields, key=lambda name: [name in stated for stated in annotations.values()].index(True)
        ):
            # a class that narrows a field of another leaves it offered as that says
            stated = [
                item
                for model in cls.__mro__
                if issubclass(model, Record) and name in model.model_fields
                for item in model.model_fields[name].metadata
                if isinstance(item, Option)
            ]
            owner = next(model for model in reversed(annotations) if name in annotations[model])
            if name in cls.flags:
                stated, owner = [cls.flags[name]], cls
            if stated:
                panel = stated[0].panel or vars(owner).get("panel")
                offered[name] = (cls.model_fields[name], replace(stated[0], panel=panel))
        return offered

    @classmethod
    def list_variants(cls) -> Mapping[str, type[JobOptions]]:
        """List the models that `method` chooses between, by its value; empty if there is only one."""
        return {}

    @classmethod
    def of(cls, recipe: str | Path | None = None, **given: Any) -> Self:
        """Merge defaults, a recipe and `given` options; a value of None is not given.

        Args:
            recipe: a YAML file, the config.json of a run, or the name of a shipped recipe.
            given: options by the names of their fields, as typed or as Python values.

        Raises:
            UsageError: an unreadable recipe, or options that are unknown, out of range or do not go together; all of
                the recipe's problems, or all of what is given, in one message.
        """
        path = None if recipe is None else find_recipe(str(recipe), cls.job)
        stated = {} if path is None else cls.translate_former(read_recipe(path, cls.job))
        typed = {name: value for name, value in given.items() if value is not None}
        for flag in dict.fromkeys(flag for name, (_, flag) in cls.former.items() if name in typed):
            old = " and ".join(f"--{name}" for name in cls.former if name in typed and cls.former[name][1] == flag)
            warnings.warn(f"{old}: give {flag}, which has taken its place", KvsearchWarning, stacklevel=3)
        typed = cls.translate_former(typed)
        model = cls.choose_model(stated, typed, path)
        unfit = [name for name, (_, option) in model.list_options().items() if name in stated and not option.recorded]
        if unfit:
            raise UsageError(f"{path}: {', '.join(unfit)} cannot be in a recipe: give it with the command")
        try:
            return model.model_validate(model.merge(dict(stated), typed))
        except (ValidationError, UsageError) as error:
            if path is not None:
                model._check_recipe(path, stated, typed)
            if isinstance(error, UsageError):
                raise
            raise model._refusal(error) from error

    @classmethod
    def translate_former(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Translate options of earlier versions, as given or of a recipe, to those that have taken their place."""
        return options

    @classmethod
    def _check_recipe(cls, path: Path, stated: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Raise UsageError if the `stated` options of a recipe are invalid with only the required `given` ones."""
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        if needed - {*stated, *given}:
            return  # what nobody gave is missing in the command, not in the recipe
        try:
            cls.model_validate(cls.merge(dict(stated), {name: given[name] for name in needed & given.keys()}))
        except ValidationError as error:
            raise UsageError(list_problems(list_validation_problems(error), str(path))) from error
        except UsageError as error:
            raise type(error)(f"{path}: {error}") from error

    @classmethod
    def _refusal(cls, error: ValidationError) -> UsageError:
        """Make the UsageError of invalid options, with flags in place of field names."""
        offered = cls.list_options()
        problems = []
        for problem in list_validation_problems(error):
            name = re.split(r"[.:]", problem, maxsplit=1)[0]
            if name in offered:
                option = offered[name][1]
                problem = option.format_flag(name) + problem[len(name) :]
                if problem.endswith(MISSING):
                    problem = (
                        f"{option.format_flag(name)} is missing: {option.help[0].lower()}{option.help[1:].rstrip('.')}"
                    )
            problems.append(problem)
        return UsageError(problems[0] if len(problems) == 1 else list_problems(problems, "what was given"))

    @classmethod
    def choose_model(cls, stated: Mapping[str, Any], given: Mapping[str, Any], path: Path | None) -> type[Self]:  # noqa: ARG003
        """Choose the model that validates the `stated` and `given` options; a job may have several."""
        return cls

    @classmethod
    def merge(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `given` options over those `stated` in a recipe."""
        return {**drop_alternatives(stated, given, cls.alternatives), **given}

    def to_recipe(self) -> dict[str, Any]:
        """Return the options as a recipe, for config.json; paths are absolute, so it works from any folder."""
        left_out = {name for name, (_, option) in self.list_options().items() if not option.recorded}
        recorded = self.model_dump(mode="json", exclude=left_out, exclude_none=True)
        return {name: value if name == "model" else _make_paths_absolute(value) for name, value in recorded.items()}


class Seeded(JobOptions):
    """Options with a seed."""

    seed: int = option(0, "Seed of everything random.", panel="Options", ge=0, le=MOST_NUMBER)


# what may be the path of a file: after the kind of a task, or a whole value with a slash or a point
_PATH = re.compile(r"(?<=jsonl:)[^+]+|(?<=ppl:)[^+]+|^[^+:=,]*[/.][^+:=,]*$")


def _make_paths_absolute(value: Any) -> Any:
    """Make paths of existing files in the value of an option absolute."""
    if isinstance(value, list):
        return list(map(_make_paths_absolute, value))
    if isinstance(value, str):
        return _PATH.sub(lambda path: str(Path(path[0]).absolute()) if Path(path[0]).exists() else path[0], value)
    return value


def parse_setting(text: str, flag: str = "--set") -> tuple[str, bool | int | float | str]:
    """Parse "key=value"; the value is true/false, a number, or a word. `flag` is for messages."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
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


def _split_list(value: object) -> object:
    """Split names or numbers as they are typed, "a,b" or 64, into a list."""
    if not isinstance(value, str):
        return [value] if isinstance(value, int) else value
    items = [item.strip() for item in value.split(",")]
    if not all(items):
        raise ValueError(f"takes values with commas between them, got {value!r}")
    return [int(item) if item.isdecimal() else item for item in items]


def join_values(sign: str) -> BeforeValidator:
    """Make a validator that joins one or several values to a text, as it is typed."""

    def join(value: object) -> object:
        return sign.join(map(str, value if isinstance(value, list | tuple) else [value]))

    return BeforeValidator(join)


def _parse_settings(value: object) -> object:
    """Parse settings as they are typed, ["window=16"], to a mapping."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        try:
            return dict(map(parse_setting, value))
        except UsageError as error:
            raise ValueError(str(error)) from error
    return value


def merge_params(stated: dict[str, Any], given: Mapping[str, Any], own_policy: str | None) -> dict[str, Any]:
    """Merge `given` options over those `stated` in a recipe, parameters one by one.

    Parameters of the recipe are for `own_policy`, and dropped under another one; None: for all policies.
    """
    merged = {**stated, **given}
    if "params" not in merged:
        return merged
    typed = given.get("params", {})
    changed = dict(typed) if isinstance(typed, Mapping) else dict(map(parse_setting, typed))
    stated_params = (
        stated.get("params", {}) if own_policy is None or given.get("policy", own_policy) == own_policy else {}
    )
    with suppress(ValueError):  # what is wrong in the recipe is left for the model to refuse
        stated_params = _parse_settings(stated_params)
    merged["params"] = {**stated_params, **changed} if isinstance(stated_params, dict) else stated_params
    return merged


def drop_alternatives(stated: dict[str, Any], given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Drop the alternatives `names` from the `stated` options of a recipe if one of them is `given`."""
    if not any(name in given for name in names):
        return stated
    return {name: value for name, value in stated.items() if name not in names}


def parse_share(value: object) -> object:
    """Parse a share as it is typed, "2%" or 0.02; what is a number of percent without the sign is refused."""
    if isinstance(value, str) and value.strip().endswith("%"):
        with suppress(ValueError):
            return float(value.strip()[:-1]) / 100
    if isinstance(value, int | float) and value >= 1:
        raise PydanticCustomError(COMPLETE, "must be a share such as 2% or 0.02, not {what}", {"what": f"{value:g}"})
    return value


Share = Annotated[float, BeforeValidator(parse_share), Field(gt=0, lt=1)]
Listed = BeforeValidator(_split_list)
Specs = Annotated[str, join_values("+")]  # of tasks
Commas = Annotated[str, join_values(",")]
Names = Annotated[tuple[str, ...], Listed]
WholeNumbers = Annotated[tuple[Annotated[int, Field(strict=True)], ...], Listed]
Repeated = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
Params = Annotated[dict[str, ScalarField], BeforeValidator(_parse_settings)]
