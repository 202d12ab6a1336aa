"""What a job says of what is kept: what it goes on with and, after Ctrl-C, how to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.jobs.talk import Talk
from kvsearch.progress import Progress

if TYPE_CHECKING:
    from kvsearch.evaluation.reply_store import ReplyStore
    from kvsearch.runs.identity import RunConfig


AGAIN = "give the same command again to go on"
FINISHED = "this run was finished: nothing was left to do"


@contextmanager
def on_interruption(talk: Talk, words: Callable[[], str]) -> Iterator[None]:
    """Say, after Ctrl-C, what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        talk.say(words())
        raise


@contextmanager
def going_on(place: Path, store: ReplyStore, replies: int, talk: Talk, again: str = AGAIN) -> Iterator[None]:
    """Say which of the `replies` are there already and, after Ctrl-C, how many are kept and how to go on."""
    if store.samples:
        talk.say(f"going on with {place}: {len(store.samples)} replies are there, {replies} are needed")
    with on_interruption(talk, lambda: f"{len(store.samples)} replies are kept in {place}: {again}"):
        yield


@contextmanager
def kept_replies(
    place: Path,
    config: RunConfig,
    replies: int,
    force: bool,
    talk: Talk,
    what: str = "batches",
    again: str = AGAIN,
) -> Iterator[tuple[ReplyStore, Progress]]:
    """Open the finished ones of the `replies` of a stage, see `open_stage` and `going_on`."""
    from kvsearch.evaluation.reply_store import open_stage

    with (
        open_stage(place, config, force) as store,
        talk.progress(what) as progress,
        going_on(place, store, replies, talk, again),
    ):
        yield store, progress
