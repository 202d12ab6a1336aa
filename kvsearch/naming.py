"""Help with names that were typed wrong."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

LONGEST = 100  # letters of a name that others may be near to


_LONGEST = 100  # letters of a name that somebody may have meant


def suggest(name: object, known: Sequence[str]) -> str:
    """Return the tail of an error message about an unknown name: the nearest known one, and all of them."""
    return f"{did_you_mean(name, known)} (known: {', '.join(known)})"


def did_you_mean(name: object, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return a question after the nearest known name, "; did you mean 'NAME'?", nothing if none is near."""
    if not isinstance(name, str) or len(name) > LONGEST:
        return ""
    if len(name) > _LONGEST:  # to compare takes the product of the lengths
        return ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
