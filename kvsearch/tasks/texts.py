"""What counts as a text that says nothing."""

from __future__ import annotations

import unicodedata

_UNSEEN = ("Cc", "Cf")  # control characters, and those of format: zero-width spaces, joiners, byte order marks


def is_blank(text: str) -> bool:
    """Return whether nothing of a text can be seen: white space, control and zero-width characters."""
    return all(char.isspace() or unicodedata.category(char) in _UNSEEN for char in text)
