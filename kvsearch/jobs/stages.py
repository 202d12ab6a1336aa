"""Stages of a job: the replies that are finished of them, and what is said of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.jobs.talk import Talk
from kvsearch.progress import Progress

if TYPE_CHECKING:
    from kvsearch.evaluation.reply_store import ReplyStore
    from kvsearch.runs.identity import RunConfig


@contextmanager
def kept_replies(
    place: Path,
    config: RunConfig,
    replies: int,
    force: bool,
    talk: Talk,
    what: str = "batches",
    again: str = "give the same command again to go on",
) -> Iterator[tuple[ReplyStore, Progress]]:
    """Open the finished ones of the `replies` of a stage, see `open_stage`; says how to go on after Ctrl-C."""
    from kvsearch.evaluation.reply_store import open_stage

    with open_stage(place, config, force) as store, talk.progress(what) as progress:
        if store.samples:
            talk.say(f"going on with {place}: {len(store.samples)} replies are there, {replies} are needed")
        try:
            yield store, progress
        except KeyboardInterrupt:
            talk.say(f"{len(store.samples)} replies are kept in {place}: {again}")
            raise
