"""What a job says while it runs: remarks, doubts, how far it is, and what is kept of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvsearch.core.errors import KvsearchWarning
from kvsearch.core.progress import Progress, SecondsLeft, Title
from kvsearch.evaluation.reply_store import open_stage

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.plan_comparison import OpenStage, StageStore
    from kvsearch.evaluation.reply_store import ReplyStore
    from kvsearch.runs.identity import RunConfig

AGAIN = "give the same command again to go on"
FINISHED = "this run was finished: nothing was left to do"


class Reporter(Protocol):
    """Hears of what a job does; it decides nothing."""

    def say(self, text: str) -> None:
        """Tell something that is not a result."""

    def warn(self, text: str) -> None:
        """Tell of something doubtful, on one line."""

    def progress(self, what: Title, left: SecondsLeft | None = None) -> AbstractContextManager[Progress]:
        """Show how far `what` is; `left` says how long it still takes (None: by its speed so far)."""

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Be told that a model is loaded, by libraries that print."""


class Silent:
    """Says nothing; doubts become a `KvsearchWarning`. For callers of the Python API."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        warnings.warn(text, KvsearchWarning, stacklevel=4)

    def progress(self, what: Title, left: SecondsLeft | None = None) -> AbstractContextManager[Progress]:  # noqa: ARG002
        return nullcontext(lambda *_: None)

    def loading(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


@contextmanager
def on_interruption(reporter: Reporter, words: Callable[[], str]) -> Iterator[None]:
    """Say, after Ctrl-C, what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        reporter.say(words())
        raise


@contextmanager
def going_on(place: Path, store: ReplyStore, replies: int, reporter: Reporter) -> Iterator[None]:
    """Say which of the `replies` are there already and, after Ctrl-C, how many are kept and how to go on."""
    if store.samples:
        reporter.say(f"going on with {place}: {len(store.samples)} replies are there, {replies} are needed")
    with on_interruption(reporter, lambda: f"{len(store.samples)} replies are kept in {place}: {AGAIN}"):
        yield


@contextmanager
def kept_replies(
    place: Path, config: RunConfig, replies: int, reporter: Reporter, what: str = "batches", force: bool = False
) -> Iterator[tuple[ReplyStore, Progress]]:
    """Open the finished ones of the `replies` of a stage, see `open_stage` and `going_on`."""
    with (
        open_stage(place, config, force) as store,
        reporter.progress(what) as progress,
        going_on(place, store, replies, reporter),
    ):
        yield store, progress


def stage_store(
    directory: Path,
    config_of: Callable[[Evaluation], RunConfig],
    reporter_of: Callable[[str], Reporter],
    *,
    title: str = "",
    force: bool = False,
) -> StageStore:
    """Return what keeps the replies of every stage in a directory of its own, below `directory`.

    Args:
        directory: of the command that has the stages.
        config_of: the configuration of a stage that asks this evaluation.
        reporter_of: who hears of the stage with this name.
        title: what the progress of all stages begins with.
        force: whether replies that cannot be gone on with are thrown away, see `open_stage`.
    """

    def open_replies(stage: str, evaluation: Evaluation) -> OpenStage:
        what = f"{title}{stage.replace('/', ', ')}: batches"
        config = config_of(evaluation)
        return kept_replies(directory / stage, config, evaluation.replies, reporter_of(stage), what, force)

    return open_replies
