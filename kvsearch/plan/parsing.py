"""From bytes to checked data, with every mistake of a hand-edited file named by its place."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.fields import COMPLETE
from kvsearch.plan.files import decoded, read_bytes
from kvsearch.plan.limits import (
    MOST_DIGITS,
    MOST_DOCUMENT,
    MOST_ITEMS,
    MOST_KEYS,
    MOST_NESTING,
    MOST_NUMBER,
)

DEEP = f"brackets are nested too deeply, {MOST_NESTING} are the most"
_HALF = "half of a surrogate pair, which is no text: write the letter itself"
_LONGEST_VALUE = 60
_MOST_SHOWN = 20
_MOST_LISTED = 5000
_MOST_SHOWN_BITS = 1024  # of a whole number
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+')
_MOST_READ = 4000  # digits; Python reads a few more
_PLAIN: Final = {"extra_forbidden": "unknown key: remove it or correct its spelling", "missing": "is missing: add it"}
_NO_WHOLE, _NO_NUMBER = "Input should be a whole number", "Input should be a number"
_OF_KIND: Final = dict.fromkeys(("int_parsing", "int_parsing_size", "int_from_float"), _NO_WHOLE) | {
    "float_parsing": _NO_NUMBER
}
_ABOUT_CONTENT: Final = frozenset({COMPLETE, "value_error", "assertion_error"})


def describe_validation_error(error: ValidationError, name: str) -> str:
    """List all problems of `error`: a first line with the file's `name`, then `path.to.field: what`, one per line."""
    return list_problems(problems_of(error), name)


def problems_of(error: ValidationError) -> list[str]:
    """List the problems of `error` as `path.to.field: what`, one line each."""
    return [f"{'.'.join(map(short_key, place)) or 'the whole'}: {what}" for place, what in located_problems(error)]


def located_problems(error: ValidationError) -> list[tuple[tuple[str | int, ...], str]]:
    """List the problems of `error`, each a place and one line; where there are very many, only how many."""
    if error.error_count() > _MOST_LISTED:
        return [((), f"has {error.error_count()} problems, too many to list: restore the file")]
    problems = []
    for line in error.errors(include_url=False):
        kind = line["type"]
        what = _PLAIN.get(kind) or _OF_KIND.get(kind) or line["msg"].removeprefix("Value error, ")
        found = "" if kind in _PLAIN or kind in _ABOUT_CONTENT else f", not {shown(line['input'])}"
        problems.append((line["loc"], " ".join(f"{what}{found}".splitlines())))
    return problems


def short_key(key: str | int) -> str:
    """Return a part of a place for a message: short, as `shown` has values."""
    text = str(key)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def list_problems(problems: list[str], name: str) -> str:
    """Put `problems` under a first line that names the file and counts them; of many, the first few."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    more = len(problems) - _MOST_SHOWN
    shown = problems if more <= 0 else [*problems[:_MOST_SHOWN], f"... and {more} more"]
    return "\n  ".join([f"{name} is not valid, {count}:", *shown])


def read_json(path: str | Path, most: int = MOST_DOCUMENT) -> Any:
    """Read a file of one JSON value; raises as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most), str(path), MOST_ITEMS if most <= MOST_DOCUMENT else sys.maxsize)


def parse_json(data: bytes, name: str, items: int = sys.maxsize) -> object:
    """Parse strict JSON: UTF-8, finite numbers, whole ones of 64 bits, no key twice, no half of a surrogate pair.

    No list has more than so many `items`.

    Raises:
        UsageError: anything else, or more nesting than `limits.MOST_NESTING`; with line and column where the parser
            knows them, or else the place.
    """
    text = decoded(data, name)
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        _refuse_values([found], _SURROGATE.search(text) is not None, items)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        hint = "the file ends too early, write it again" if cut else error.msg
        raise UsageError(f"{name} is not valid JSON at {where}: {hint}") from error
    except RecursionError as error:
        raise UsageError(f"{name} is not valid JSON: {DEEP}") from error
    except ValueError as error:
        what = (_long_number(text) if "digits" in str(error) else "") or f": {error}"
        raise UsageError(f"{name} is not valid JSON{what}") from error
    return found


def integer(text: str) -> int:
    """Read a whole number; ValueError if it has more than 64 bits."""
    number = int(text) if len(text) <= MOST_DIGITS + 1 else None
    if number is None or abs(number) > MOST_NUMBER:
        raise ValueError(f"{shown(text)} is too large: {MOST_NUMBER} is the most")
    return number


def is_text(value: str) -> bool:
    """Tell whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value) if not value.isascii() else True


class _Refused(ValueError):
    """A value that is not taken; `keys` lead to it from the list that `parse_json` puts around all, innermost first."""

    def __init__(self, what: str, *keys: object) -> None:
        super().__init__(what)
        self.what, self.keys = what, list(keys)

    def __str__(self) -> str:
        return f"{'.'.join(short_key(str(key)) for key in self.keys[-2::-1]) or 'the whole'}: {self.what}"


def _refuse_values(holder: Any, surrogates: bool, items: int, depth: int = 0) -> None:
    """Raise ValueError for too large a number or list, and too much nesting; with `surrogates`, look for these, too.

    `holder` has `depth` lists or objects around its values, but for the one that `parse_json` puts around all.
    """
    is_object = type(holder) is dict
    if is_object and surrogates and not all(map(is_text, holder)):
        raise _Refused(f"a key has {_HALF}")
    if len(holder) > items and not is_object:
        raise _Refused(f"has {len(holder)} items, {items} are the most")
    for key, value in holder.items() if is_object else enumerate(holder):
        kind = type(value)
        if kind is int:
            if not -MOST_NUMBER <= value <= MOST_NUMBER:
                raise _Refused(f"{shown(value)} is too large: {MOST_NUMBER} is the most", key)
        elif kind is dict or kind is list:
            if depth >= MOST_NESTING:
                raise ValueError(DEEP)
            if value:
                try:
                    _refuse_values(value, surrogates, items, depth + 1)
                except _Refused as refused:
                    refused.keys.append(key)
                    raise
        elif kind is float:
            if not math.isfinite(value):
                raise _Refused("a number is too large to be finite", key)
        elif surrogates and kind is str and not is_text(value):
            raise _Refused(f"has {_HALF}", key)


def _long_number(text: str) -> str:
    """Say where a number stands that has too many digits for Python to read it; nothing if none has."""
    for found in _STRING_OR_NUMBER.finditer(text):
        if found[0][0] != '"' and len(found[0]) > _MOST_READ:
            line = text.count("\n", 0, found.start()) + 1
            column = found.start() - text.rfind("\n", 0, found.start())
            return f" at line {line} column {column}: {shown(found[0])} is too large: {MOST_NUMBER} is the most"
    return ""


def require_header(data: object, kind: str, version: int, name: str) -> dict[str, Any]:
    """Take `data` as a dictionary whose "format" is `kind` and whose "version" this release reads.

    Raises:
        UsageError: another kind of file, or one written by a newer kvsearch.
    """
    if not isinstance(data, dict) or data.get("format") != kind:
        found = f"its format is {shown(data.get('format'))}" if isinstance(data, dict) else "it holds no object"
        raise UsageError(f'{name} is not a {kind} file: {found} where "format": "{kind}" is expected')
    given = data.get("version")
    if type(given) is not int or given < 1:
        raise UsageError(f'{name} has no valid version: found {shown(given)} where "version": {version} is expected')
    if given > version:
        raise UsageError(f"{name} was written by a newer kvsearch (version {given}, this one reads {version}): upgrade")
    return data


def shown(value: object) -> str:
    """Return a value for a message: short, without what is in it."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > _MOST_SHOWN_BITS:
        return "a number of very many digits"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MOST_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, {MOST_KEYS} are the most")
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number JSON knows")
