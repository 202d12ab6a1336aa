"""Field types of the files users write: calibration data and tasks."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator

_UNSEEN = ("Cc", "Cf")  # control characters, and those of format: zero-width spaces, joiners, byte order marks


def is_blank(text: str) -> bool:
    """Return whether a text has only white space, control and zero-width characters."""
    return all(char.isspace() or unicodedata.category(char) in _UNSEEN for char in text)


def trim(text: str) -> str:
    """Strip white space, control and zero-width characters from both ends of a text."""
    seen = [place for place, letter in enumerate(text) if not is_blank(letter)]
    return text[seen[0] : seen[-1] + 1] if seen else ""


def _require_visible_text(text: str) -> str:
    if is_blank(text):
        raise ValueError("must not be blank")
    return text


def _require_items(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not items:
        raise ValueError("must not be empty")
    return items


Filled = Annotated[str, AfterValidator(_require_visible_text)]
Name = Annotated[Filled, AfterValidator(trim)]  # what is compared: filled in by hand, it may have blanks around it
# unlike a least length, not checked (and complained about) where an item is wrong already
NotEmpty = AfterValidator(_require_items)
