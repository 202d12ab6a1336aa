"""What a method holds in the cache, as evaluations measure it."""

from __future__ import annotations

from typing import NamedTuple


class Footprint(NamedTuple):
    """Entries and bytes once context or prompt were compressed, the most entries until the reply was complete."""

    entries: float
    bytes: float
    most: float
