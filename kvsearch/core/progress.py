"""How far work has come, for whoever wants to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Progress = Callable[[int, int], None]  # what is done, and how much there is to do
Title = str | Callable[[], str]  # of what is being done


def counted(items: Iterable[Item], total: int, progress: Progress | None) -> Iterator[Item]:
    """Yield `items`, and tell `progress` before the first and after each how many of `total` are done."""
    if progress is not None:
        progress(0, total)
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, total)


def clock_words(seconds: float) -> str:
    """Return a time as minutes and seconds, 1:05, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
