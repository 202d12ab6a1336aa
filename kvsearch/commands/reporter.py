"""Reporters of jobs: messages, warnings, progress, and stored replies."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvsearch.core.errors import KvsearchWarning
from kvsearch.core.items import Progress, Title, describe_item
from kvsearch.evaluation.reply_store import open_run, open_stage

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation, StageStore
    from kvsearch.evaluation.reply_store import ReplyStore
    from kvsearch.runs.identity import RunConfig
    from kvsearch.tasks.encode import TaskPrompts

RESUME_HINT = "give the same command again to go on"
FINISHED_NOTE = "this run was finished: nothing was left to do"
PROGRESS_PARTS = 1000  # of the whole, as the display counts them
SKIPPED_SECONDS = 1.0  # in which a stage ends that was finished before: so many, or so much of its estimate
SKIPPED_SHARE = 0.05


class Reporter(Protocol):
    """Receives messages and progress of a job; it decides nothing."""

    def say(self, text: str) -> None:
        """Report a message that is not a result."""

    def warn(self, text: str) -> None:
        """Report a warning, on one line."""

    def progress(self, what: Title) -> AbstractContextManager[Progress]:
        """Show the progress of `what`."""

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Enclose the loading of a model, during which libraries print."""


class NullReporter:
    """Reports nothing but warnings, as `KvsearchWarning`; for callers of the Python API."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        warnings.warn(text, KvsearchWarning, stacklevel=4)

    def progress(self, what: Title) -> AbstractContextManager[Progress]:  # noqa: ARG002
        return nullcontext(lambda *_: None)

    def loading(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


def warn_about_coverage(reporter: Reporter, encoded: Iterable[TaskPrompts], *, few: bool = True) -> None:
    """Warn about tasks with truncated contexts, and, if `few`, with fewer contexts than requested."""
    for task in encoded:
        part = "" if task.coverage.split in (None, "all") else f" in split {task.coverage.split}"
        if few and task.coverage.shortfall is not None:
            reporter.warn(f"{task.coverage.shortfall}{part}")
        if task.coverage.cut is not None:
            reporter.warn(f"{task.coverage.cut}{part}: they are longer than the model or --max-length allows")


@contextmanager
def on_interruption(reporter: Reporter, words: Callable[[], str]) -> Iterator[None]:
    """After Ctrl-C report what is kept and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        reporter.say(words())
        raise


# --- one display over all stages of a long job ----------------------------------------------------------------------


class StagedProgress:
    """One progress display over the named stages of a long job, weighted by their estimated times.

    `words` returns what is said of a stage that begins, by its name and by how many times as long as was said those
    before it took, None where none was really done.
    """

    def __init__(
        self, reporter: Reporter, work: Mapping[str, float], words: Callable[[str, float | None], str] | None = None
    ) -> None:
        self.reporter = reporter
        self.work = work
        self.words = words
        self.taken: dict[str, float] = {}
        self.whole = sum(work.values())
        self.show: Progress = lambda *_: None
        self.title = next(iter(work), "")
        self.done = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[StageReporter]:
        """Begin a stage, and yield the reporter of its job."""
        before = self.done
        began = time.monotonic()
        self.title = name
        said = sum(self.work[done] for done in self.taken)
        pace = sum(self.taken.values()) / said if said else None
        more = "" if self.words is None else f" ({self.words(name, pace)})"
        self.reporter.say(f"stage {list(self.work).index(name) + 1} of {len(self.work)}: {name}{more}")

        def at(share: float, item: str) -> None:
            self.title = f"{name}: {item}"
            self._at(before + share * self.work[name])

        yield StageReporter(self.reporter, at)
        self.title = name
        if (taken := time.monotonic() - began) < max(SKIPPED_SECONDS, SKIPPED_SHARE * self.work[name]):
            self.whole -= self.work[name]
            self.done = before
        else:
            self.taken[name] = taken
            self._at(before + self.work[name])

    def _at(self, done: float) -> None:
        self.done = max(self.done, done)
        self.show(round(PROGRESS_PARTS * self.done / self.whole), PROGRESS_PARTS)


@contextmanager
def show_stages(
    reporter: Reporter,
    work: Mapping[str, float],
    directory: Path,
    words: Callable[[str, float | None], str] | None = None,
) -> Iterator[StagedProgress]:
    """Show one bar over stages, see `StagedProgress`; after Ctrl-C say where what is finished is kept."""
    display = StagedProgress(reporter, work, words)
    again = f"what is finished is kept in {directory}: {RESUME_HINT}"
    with on_interruption(reporter, lambda: again), reporter.progress(lambda: display.title) as show:
        display.show = show
        yield display


class StageReporter:
    """A `Reporter` of one stage: each step advances by a `part` of the remainder, never back.

    `at` receives the finished share of the stage, and the current item.
    """

    def __init__(self, reporter: Reporter, at: Callable[[float, str], None]) -> None:
        self.reporter = reporter
        self.at = at
        self.part = 1.0
        self.done = 0.0

    def say(self, text: str) -> None:
        """Ignore the message: first and last messages are printed once for the whole run."""

    def warn(self, text: str) -> None:
        self.reporter.warn(text)

    @contextmanager
    def progress(self, what: Title) -> Iterator[Progress]:
        before = self.done

        def show(done: int, total: int) -> None:
            share = done / total if total else 1.0
            self.done = max(self.done, before + self.part * share * (1 - before))
            self.at(self.done, describe_item(what, done, total))

        yield show

    def loading(self, name: str) -> AbstractContextManager[None]:
        return self.reporter.loading(name)


# --- replies that are kept -------------------------------------------------------------------------------------------


@contextmanager
def resuming_replies(place: Path, store: ReplyStore, replies: int, reporter: Reporter) -> Iterator[None]:
    """Report how many of the `replies` are stored and, after Ctrl-C, how many are kept and how to resume."""
    if store.samples:
        reporter.say(f"going on with {place}: {len(store.samples)} replies are there, {replies} are needed")
    with on_interruption(reporter, lambda: f"{len(store.samples)} replies are kept in {place}: {RESUME_HINT}"):
        yield


@contextmanager
def open_replies(
    directory: Path | None, config: RunConfig, replies: int, reporter: Reporter, force: bool = False
) -> Iterator[ReplyStore | None]:
    """Open the stored replies of a run, if there is a directory; the run is sealed at the end.

    See `open_run` and `resuming_replies`.
    """
    if directory is None:
        unkept = "nothing is kept without --output DIR, with which a run can go on where it stopped"
        with on_interruption(reporter, lambda: unkept):
            yield None
        return
    with open_run(directory, config, force) as (run, store), resuming_replies(directory, store, replies, reporter):
        yield store
        run.finish()
    if run.state == "finished":
        reporter.say(FINISHED_NOTE)


def make_stage_store(
    directory: Path,
    config_of: Callable[[Evaluation], RunConfig],
    reporter: Reporter,
    *,
    title: str = "",
    force: bool = False,
) -> StageStore:
    """Make a store that keeps the replies of every stage in its own directory below `directory`.

    Args:
        directory: of the command that has the stages.
        config_of: the configuration of a stage that asks this evaluation.
        reporter: who hears of the stages.
        title: what the progress of all stages begins with.
        force: whether replies that cannot be gone on with are thrown away, see `open_stage`.
    """

    @contextmanager
    def open_replies(stage: str, evaluation: Evaluation) -> Iterator[tuple[ReplyStore, Progress]]:
        place = directory / stage
        with (
            open_stage(place, config_of(evaluation), force) as store,
            reporter.progress(f"{title}{stage.replace('/', ', ')}: context") as progress,
            resuming_replies(place, store, evaluation.replies, reporter),
        ):
            yield store, progress

    return open_replies
