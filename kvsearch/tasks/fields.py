"""Field types of the files users write: calibration data and tasks."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator

_UNSEEN = ("Cc", "Cf")  # control characters, and those of format: zero-width spaces, joiners, byte order marks


def is_blank(text: str) -> bool:
    """Return whether nothing of a text can be seen: white space, control and zero-width characters."""
    return all(char.isspace() or unicodedata.category(char) in _UNSEEN for char in text)


def _filled(text: str) -> str:
    if is_blank(text):
        raise ValueError("must not be blank")
    return text


def _some(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not items:
        raise ValueError("must not be empty")
    return items


Filled = Annotated[str, AfterValidator(_filled)]
# unlike a least length, not checked (and complained about) where an item is wrong already
NotEmpty = AfterValidator(_some)
