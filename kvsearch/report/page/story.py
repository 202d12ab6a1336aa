"""What was asked, and the answer to it."""

from __future__ import annotations

from typing import NamedTuple


class Story(NamedTuple):
    """What was asked, the answer in one sentence, and what else is to be known, a line each."""

    asked: str
    answer: str = ""
    remarks: tuple[str, ...] = ()


def sentence(text: str) -> str:
    """Return a text with a full stop; names at its beginning stay as they are."""
    return text if not text or text.endswith((".", "?", "!")) else f"{text}."
