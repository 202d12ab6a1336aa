"""Field types of the files users write: calibration data and tasks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


def _some(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not items:
        raise ValueError("must not be empty")
    return items


Filled = Annotated[str, AfterValidator(_filled)]
# unlike a least length, not checked (and complained about) where an item is wrong already
NotEmpty = AfterValidator(_some)
