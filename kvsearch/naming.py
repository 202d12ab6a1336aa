"""Help with names that were typed wrong."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def suggest(name: str, known: Sequence[str]) -> str:
    """Return the tail of an error message about an unknown name: the nearest known one, and all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{hint} (known: {', '.join(known)})"
