"""Parameters of policies and allocations as plans and recipes have them: their types, and the range of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.limits import MOST_ENTRIES, MOST_OF
from kvsearch.plan.parsing import shown


def typed_values(given: Mapping[str, object], defaults: Mapping[str, object], owner: str, noun: str) -> dict[str, Any]:
    """Return parameters checked against the types of their `defaults`; whole numbers become floats where these are.

    A default of `dataclasses.MISSING` permits any type. What a number may be at most is the same wherever a parameter
    has that name, see `limits.MOST_OF`; what else it may be, its policy says.

    Raises:
        UsageError: `owner` has no such `noun`, its type is another one, or it is out of all range.
    """
    values = dict(given)
    for key, value in values.items():
        if key not in defaults:
            raise UsageError(f"{owner} has no {noun} {key!r}{suggest(key, list(defaults))}")
        most = MOST_OF.get(key, MOST_ENTRIES)
        if isinstance(value, int) and abs(value) > most:
            raise UsageError(f"{owner}: {key} must be {most} or less, got {shown(value)}")
        wanted = type(defaults[key])
        if wanted is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not wanted and defaults[key] is not dataclasses.MISSING:
            raise UsageError(f"{owner}: {key} must be {wanted.__name__}, got {shown(value)}")
    return values
