"""From bytes to checked data, with every mistake of a hand-edited file named by its place."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.fields import COMPLETE

_LONGEST_VALUE = 60
_MOST_SHOWN = 20
_PLAIN: Final = {"extra_forbidden": "unknown key: remove it or correct its spelling", "missing": "is missing: add it"}
_ABOUT_CONTENT: Final = frozenset({COMPLETE, "value_error", "assertion_error"})


def describe_validation_error(error: ValidationError, name: str) -> str:
    """List all problems of `error`: a first line with the file's `name`, then `path.to.field: what`, one per line."""
    return list_problems(problems_of(error), name)


def problems_of(error: ValidationError) -> list[str]:
    """List the problems of `error` as `path.to.field: what`, one line each."""
    problems = []
    for line in error.errors(include_url=False):
        kind, place = line["type"], ".".join(map(str, line["loc"])) or "the whole"
        what = _PLAIN.get(kind, line["msg"].removeprefix("Value error, "))
        shown = "" if kind in _PLAIN or kind in _ABOUT_CONTENT else f", not {_shown(line['input'])}"
        problems.append(" ".join(f"{place}: {what}{shown}".splitlines()))
    return problems


def list_problems(problems: list[str], name: str) -> str:
    """Put `problems` under a first line that names the file and counts them; of many, the first few."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    more = len(problems) - _MOST_SHOWN
    shown = problems if more <= 0 else [*problems[:_MOST_SHOWN], f"... and {more} more"]
    return "\n  ".join([f"{name} is not valid, {count}:", *shown])


def parse_json(data: bytes, name: str) -> object:
    """Parse strict JSON: UTF-8, finite numbers, no key twice in one object.

    Raises:
        UsageError: anything else, with line and column where the parser knows them.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        hint = "the file ends too early, write it again" if cut else error.msg
        raise UsageError(f"{name} is not valid JSON at {where}: {hint}") from error
    except RecursionError as error:
        raise UsageError(f"{name} is not valid JSON: brackets are nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from error


def require_header(data: object, kind: str, version: int, name: str) -> dict[str, Any]:
    """Take `data` as a dictionary whose "format" is `kind` and whose "version" this release reads.

    Raises:
        UsageError: another kind of file, or one written by a newer kvsearch.
    """
    if not isinstance(data, dict) or data.get("format") != kind:
        found = f"its format is {_shown(data.get('format'))}" if isinstance(data, dict) else "it holds no object"
        raise UsageError(f'{name} is not a {kind} file: {found} where "format": "{kind}" is expected')
    given = data.get("version")
    if type(given) is not int or given < 1:
        raise UsageError(f'{name} has no valid version: found {_shown(given)} where "version": {version} is expected')
    if given > version:
        raise UsageError(f"{name} was written by a newer kvsearch (version {given}, this one reads {version}): upgrade")
    return data


def _shown(value: object) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number JSON knows")
