"""One byte sequence per value: JSON that is the same on every machine, and that a person can review as a diff."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable

from pydantic import BaseModel

from kvsearch.core.errors import InternalError, UsageError

_INDENT = "  "
_LINE = 100
_encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder for every value


def canonical_json(obj: object) -> bytes:
    """Return UTF-8 JSON with sorted keys, indents of two, short lists of numbers on one line and a newline at the end.

    Takes dictionaries with text keys, lists, tuples, JSON scalars and pydantic models.

    Raises:
        UsageError: a number is not finite or a text cannot be stored as UTF-8.
        InternalError: a value or key of another type.
    """
    text = _write(obj, "", "")
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"cannot write half of a surrogate pair as UTF-8: {error.object[error.start]!r}") from error


def hash_json(obj: object) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of `obj`; raises as `canonical_json`."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def _write(value: object, indent: str, place: str) -> str:
    if isinstance(value, BaseModel):
        return _write(value.model_dump(), indent, place)
    if isinstance(value, dict):
        deeper = indent + _INDENT
        for key in value:
            if not isinstance(key, str):
                raise InternalError(f"cannot write the key {key!r} at {_name_place(place)}: JSON keys are text")
        members = (
            f"{_format_scalar(key, place)}: {_write(value[key], deeper, f'{place}.{key}')}" for key in sorted(value)
        )
        return _format_block("{", members, "}", indent)
    if isinstance(value, list | tuple):
        if all(isinstance(item, int | float) for item in value):
            line = f"[{', '.join(_format_scalar(item, place) for item in value)}]"
            if len(indent) + len(line) <= _LINE:
                return line
        written = (_write(item, indent + _INDENT, f"{place}.{index}") for index, item in enumerate(value))
        return _format_block("[", written, "]", indent)
    return _format_scalar(value, place)


def _format_block(opening: str, members: Iterable[str], closing: str, indent: str) -> str:
    lines = f",\n{indent}{_INDENT}".join(members)
    return f"{opening}\n{indent}{_INDENT}{lines}\n{indent}{closing}" if lines else opening + closing


def _format_scalar(value: object, place: str) -> str:
    if value is None or isinstance(value, str | int):
        return _encode(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"cannot write {float(value)} at {_name_place(place)}: JSON has finite numbers only")
        return float.__repr__(value)
    raise InternalError(f"cannot write a {type(value).__name__} at {_name_place(place)} as JSON")


def _name_place(place: str) -> str:
    return place.removeprefix(".") or "the top"
