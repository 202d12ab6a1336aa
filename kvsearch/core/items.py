"""Items in groups, and how far work on them has come, for whoever wants to be told."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Progress = Callable[[int, int], None]  # what is done, and how much there is to do
Title = str | Callable[[], str]  # the item that is being done, numbers follow: "asking: context"; or all that is said


def group_by_key(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by their keys; keys and the items of each are in the order in which they came."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def with_progress(
    items: Iterable[Item], total: int, progress: Progress | None, weigh: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """Yield `items`, and report to `progress` before the first and after each how many of `total` are done.

    An item may `weigh` more than one.
    """
    done = 0
    if progress is not None:
        progress(done, total)
    for item in items:
        yield item
        done += weigh(item)
        if progress is not None:
            progress(done, total)


def describe_item(what: Title, done: int, total: int) -> str:
    """Describe the item in progress: "asking: context 3 of 27"."""
    return f"{what} {min(done + 1, total):,} of {total:,}" if isinstance(what, str) else what()


def format_clock(seconds: float) -> str:
    """Return a time as minutes and seconds, 1:05, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
