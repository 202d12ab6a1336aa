"""Help with names and values that were typed wrong."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from kvsearch.errors import UsageError

LONGEST = 100  # letters of a name that others may be near to


def suggest(name: object, known: Sequence[str]) -> str:
    """Return the tail of an error message about an unknown name: the nearest known one, and all of them."""
    return f"{did_you_mean(name, known)} (known: {', '.join(known)})"


def did_you_mean(name: object, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return a question after the nearest known name, "; did you mean 'NAME'?", nothing if none is near."""
    if not isinstance(name, str) or len(name) > LONGEST:
        return ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def typed_values(given: Mapping[str, object], defaults: Mapping[str, object], owner: str, noun: str) -> dict[str, Any]:
    """Return parameters checked against the types of their `defaults`; whole numbers become floats where these are.

    A default of `dataclasses.MISSING` permits any type.

    Raises:
        UsageError: `owner` has no such `noun`, or its type is another one.
    """
    values = dict(given)
    for key, value in values.items():
        if key not in defaults:
            raise UsageError(f"{owner} has no {noun} {key!r}{suggest(key, list(defaults))}")
        wanted = type(defaults[key])
        if wanted is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not wanted and defaults[key] is not dataclasses.MISSING:
            raise UsageError(f"{owner}: {key} must be {wanted.__name__}, got {value!r}")
    return values
