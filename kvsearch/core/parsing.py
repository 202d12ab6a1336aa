"""From bytes to checked data, with every mistake of a hand-edited file named by its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from kvsearch.core.errors import UsageError
from kvsearch.core.fields import COMPLETE
from kvsearch.core.files import decode_text, read_text
from kvsearch.core.limits import MOST_DOCUMENT
from kvsearch.core.naming import suggest_nearest
from kvsearch.core.printed import pluralize, truncate

Valid = TypeVar("Valid")

# what a library may raise that reads a file of which nobody has thought
FAULTS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_LONGEST_VALUE = 60
_LONGEST_FAULT = 300
_MOST_SHOWN = 20
_MOST_LISTED = 5000
_MOST_SHOWN_BITS = 1024  # of a whole number
MISSING: Final = "is missing: add it"
_UNKNOWN: Final = "unknown key: remove it or correct its spelling"
_PLAIN: Final = {"extra_forbidden": _UNKNOWN, "missing": MISSING}
_NO_WHOLE: Final = "must be a whole number"
_OF_KIND: Final = {
    "int_parsing": _NO_WHOLE,
    "int_parsing_size": _NO_WHOLE,
    "int_from_float": _NO_WHOLE,
    "float_parsing": "must be a number",
    "model_type": "must be an object",
    "tuple_type": "must be a list",  # a tuple is a word that who writes files need not know
}
_PLAINER: Final = {  # words of pydantic
    "Value error, ": "", "Input should": "must", "greater than or equal to": "at least",
    "less than or equal to": "at most", "a valid integer": "a whole number", "a valid string": "text",
}  # fmt: skip
_ABOUT_CONTENT: Final = (COMPLETE, "too_long", "value_error", "assertion_error")


def validate_content(validate: Callable[[Any], Valid], content: Any, name: str) -> Valid:
    """Validate a file's content with pydantic's `validate`; UsageError, as below, with all its problems."""
    try:
        return validate(content)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, name)) from error


def describe_validation_error(error: ValidationError, name: str) -> str:
    """List all problems of `error`: a first line with the file's `name`, then `path.to.field: what`, one per line."""
    return list_problems(list_validation_problems(error), name)


def list_validation_problems(error: ValidationError, known: Sequence[str] = ()) -> list[str]:
    """List the problems of `error` as `path.to.field: what`, one line each; `known` keys are what others may mean."""
    return [
        f"{'.'.join(map(shorten_key, place)) or 'the whole'}: {what}"
        + (suggest_nearest(place[-1], known) if what == _UNKNOWN else "")
        for place, what in locate_problems(error)
    ]


def locate_problems(error: ValidationError) -> list[tuple[tuple[str | int, ...], str]]:
    """List the problems of `error`, each a place and one line; where there are very many, only how many."""
    if error.error_count() > _MOST_LISTED:
        return [((), f"has {error.error_count()} problems, too many to list: restore the file")]
    problems = []
    for line in error.errors(include_url=False):
        kind = line["type"]
        what = _PLAIN.get(kind) or _OF_KIND.get(kind) or line["msg"]
        for phrase, plainer in _PLAINER.items():
            what = what.replace(phrase, plainer)
        value = "" if kind in _PLAIN or kind in _ABOUT_CONTENT else f", not {format_value(line['input'])}"
        problems.append((line["loc"], " ".join(f"{what}{value}".splitlines())))
    return problems


def shorten_key(key: str | int) -> str:
    """Shorten one key of a place for a message, as `format_value` shortens values."""
    return truncate(str(key), _LONGEST_VALUE)


def list_problems(problems: list[str], name: str) -> str:
    """Put `problems` under a first line that names the file and counts them; of many, the first few."""
    more = len(problems) - _MOST_SHOWN
    shown = problems if more <= 0 else [*problems[:_MOST_SHOWN], f"... and {more} more"]
    return "\n  ".join([f"{name} is not valid, {pluralize(len(problems), 'problem')}:", *shown])


def read_json(path: str | Path, max_bytes: int = MOST_DOCUMENT) -> Any:
    """Read a file of one JSON value; raises as `read_text` and `parse_json`."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path))


def parse_json(data: bytes | str, name: str) -> Any:
    """Parse JSON; UsageError for anything else, a key twice in one object, or what `require_plain` refuses."""
    text = data if isinstance(data, str) else decode_text(data, name)
    try:
        content = json.loads(text, object_pairs_hook=_require_unique_keys)
        require_plain(content)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise UsageError(f"{name} is not valid JSON at {place}: {error.msg[0].lower()}{error.msg[1:]}") from error
    except FAULTS as error:
        raise UsageError(f"{name} is not valid JSON: {describe_fault(error)}") from error
    return content


def require_plain(content: Any) -> None:
    """Raise ValueError if a number is not finite or a text is no UTF-8, RecursionError for very deep nesting."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError("a number in it is NaN or infinite") from error
    text.encode()


def describe_fault(error: BaseException) -> str:
    """Return what a library says of a file that it cannot read, `shorten`; its kind if that says too little."""
    return format_error(error) if isinstance(error, KeyError) else shorten(str(error)) or type(error).__name__


def format_error(error: BaseException) -> str:
    """Return type and text of an error, `shorten`."""
    return shorten(f"{type(error).__name__}: {error}")


def shorten(text: str) -> str:
    """Return a text on one line and not too long."""
    return truncate(" ".join(text.split()), _LONGEST_FAULT)


def is_text(value: str) -> bool:
    """Return True if a text can be written as UTF-8: it has no half of a surrogate pair."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def require_header(data: object, kind: str, version: int, name: str) -> dict[str, Any]:
    """Take `data` as a dictionary whose "format" is `kind` and whose "version" this release reads.

    Raises:
        UsageError: another kind of file, or one written by a newer kvsearch.
    """
    if not isinstance(data, dict) or data.get("format") != kind:
        stated = data.get("format") if isinstance(data, dict) else None
        fault = f'it has no "format": "{kind}"' if stated is None else f"its format is {format_value(stated)}"
        raise UsageError(f"{name} is not a {kind} file: {fault}")
    given = data.get("version")
    if type(given) is not int or given < 1:
        raise UsageError(
            f'{name} has no valid version: found {format_value(given)} where "version": {version} is expected'
        )
    if given > version:
        raise UsageError(f"{name} was written by a newer kvsearch (version {given}, this one reads {version}): upgrade")
    return data


def format_value(value: object) -> str:
    """Format a value for a message: short, and without the content of containers."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > _MOST_SHOWN_BITS:
        return "a number of very many digits"
    return "null" if value is None else truncate(repr(value), _LONGEST_VALUE)


def _require_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        content[key] = value
    return content
