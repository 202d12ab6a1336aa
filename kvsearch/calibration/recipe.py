"""What to calibrate: defaults, then a recipe file, then what the user typed. All problems show before a model loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvsearch.calibration.methods import RECIPES, CalibrationRecipe
from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.parsing import describe_validation_error, list_problems, problems_of
from kvsearch.recipe_files import find_recipe, read_recipe

DEFAULT_METHOD = "lukv"
FOLDER, EXAMPLE = "recipes", "policy: snapkv"


def resolve_recipe(
    path: Path | None, typed: Mapping[str, Any], settings: Sequence[str], options: Sequence[str] = ()
) -> CalibrationRecipe:
    """Merge defaults, the recipe file and what the user typed, in this order; the method decides which options exist.

    Args:
        path: a YAML file, or None.
        typed: options by name, `method` and `policy` among them; None: not typed.
        settings: policy parameters, as key=value.
        options: options of the method, as key=value; they win over `typed`.

    Raises:
        UsageError: an unreadable file, or settings that do not exist; those of the file all in one message.
    """
    merged = read_recipe(path, EXAMPLE) if path is not None else {}
    given = {key: value for key, value in typed.items() if value is not None}
    method = _method(path, merged.pop("method", None), given.pop("method", None))
    policy = given.pop("policy", None)
    given |= dict(parse_setting(item, "--option") for item in options)
    _check_typed(method, given)
    own = merged.get("policy", RECIPES[method].model_fields["policy"].default)
    if policy not in (None, own) and RECIPES[method].own_params:
        merged.pop("params", None)  # they belong to the recipe's own policy
    if policy is not None:
        merged["policy"] = policy
    set_here, params = dict(parse_setting(item) for item in settings), merged.get("params", {})
    if set_here and isinstance(params, dict):
        merged["params"] = {**params, **set_here}
    try:
        return RECIPES[method].model_validate({**merged, **given})
    except ValidationError as error:
        raise _refusal(error, method, path) from error


def _refusal(error: ValidationError, method: str, path: Path | None) -> UsageError:
    """All that is wrong with a file, or else with what was typed over it."""
    if path is None:
        return UsageError(describe_validation_error(error, "the calibration settings"))
    try:
        RECIPES[method].model_validate({"method": method, **read_recipe(path, EXAMPLE)})
    except ValidationError as alone:
        shared = [problem for problem in problems_of(alone) if problem in problems_of(error)]
        if shared:
            return UsageError(list_problems(shared, str(path)))
    return UsageError(describe_validation_error(error, f"what was typed over the recipe {path}"))


def _method(path: Path | None, stated: object, typed: str | None) -> str:
    """The method of a recipe file, or the one that was typed; UsageError if they differ or there is no such method."""
    if typed is not None and typed not in RECIPES:
        raise UsageError(f"unknown method {typed!r}{suggest(typed, list(RECIPES))}")
    if stated is None:
        return typed or DEFAULT_METHOD
    if not isinstance(stated, str) or stated not in RECIPES:
        problem = f"method: {stated!r} is unknown{suggest(str(stated), list(RECIPES))}"
        raise UsageError(list_problems([problem], str(path)))
    if typed not in (None, stated):
        raise UsageError(f"{path} is a recipe of method {stated}, not {typed}: leave --method or --recipe out")
    return stated


def _check_typed(method: str, given: Mapping[str, Any]) -> None:
    """UsageError names the first typed option that the method does not have, or a value that is no choice of it."""
    recipe = RECIPES[method]
    for key, value in given.items():
        if key not in recipe.option_names():
            raise UsageError(f"method {method} has no option {key!r}{suggest(key, recipe.option_names())}")
        choices = recipe.choices(key)
        if choices and value not in choices:
            raise UsageError(f"unknown {key} {value!r}{suggest(str(value), choices)}")


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


def recipe_path(name: str) -> Path:
    """The file of that name or, for a bare name such as lukv-keydiff, the recipe that is shipped."""
    return find_recipe(name, FOLDER)
