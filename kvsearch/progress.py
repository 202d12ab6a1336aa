"""How far work has come, for whoever wants to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Progress = Callable[[int, int], None]  # what is done, and how much there is to do


def counted(items: Iterable[Item], total: int, progress: Progress | None) -> Iterator[Item]:
    """Yield `items`, and tell `progress` after each how many of `total` are done."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, total)
