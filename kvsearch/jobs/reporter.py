"""What a job says while it runs: remarks, doubts, how far it is, and what is kept of it."""

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

AGAIN = "give the same command again to go on"
FINISHED = "this run was finished: nothing was left to do"
PARTS = 1000  # of the whole, as the display counts them
AT_ONCE = 1.0  # seconds in which a stage ends that was finished before


class Reporter(Protocol):
    """Hears of what a job does; it decides nothing."""

    def say(self, text: str) -> None:
        """Tell something that is not a result."""

    def warn(self, text: str) -> None:
        """Tell of something doubtful, on one line."""

    def progress(self, what: Title) -> AbstractContextManager[Progress]:
        """Show how far `what` is."""

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Be told that a model is loaded, by libraries that print."""


class Silent:
    """Says nothing; doubts become a `KvsearchWarning`. For callers of the Python API."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        warnings.warn(text, KvsearchWarning, stacklevel=4)

    def progress(self, what: Title) -> AbstractContextManager[Progress]:  # noqa: ARG002
        return nullcontext(lambda *_: None)

    def loading(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


def warn_of_coverage(reporter: Reporter, encoded: Iterable[TaskPrompts], *, few: bool = True) -> None:
    """Warn of tasks with contexts that were cut, and, if `few`, with fewer contexts than were asked for."""
    for task in encoded:
        part = "" if task.coverage.split in (None, "all") else f" in split {task.coverage.split}"
        if few and task.coverage.shortfall is not None:
            reporter.warn(f"{task.coverage.shortfall}{part}")
        if task.coverage.cut is not None:
            reporter.warn(f"{task.coverage.cut}{part}: they are longer than the model or --max-length allows")


@contextmanager
def on_interruption(reporter: Reporter, words: Callable[[], str]) -> Iterator[None]:
    """Say, after Ctrl-C, what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        reporter.say(words())
        raise


# --- one display over all stages of a long job ----------------------------------------------------------------------


class Overall:
    """The stages of a long job by name, with how long each is said to take; what was kept is left out of the whole.

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
        """Begin a stage, and give whom its job talks to."""
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
        if (taken := time.monotonic() - began) < AT_ONCE:
            self.whole -= self.work[name]
            self.done = before
        else:
            self.taken[name] = taken
            self._at(before + self.work[name])

    def _at(self, done: float) -> None:
        self.done = max(self.done, done)
        self.show(round(PARTS * self.done / self.whole), PARTS)


@contextmanager
def overall(
    reporter: Reporter,
    work: Mapping[str, float],
    directory: Path,
    words: Callable[[str, float | None], str] | None = None,
) -> Iterator[Overall]:
    """Show one bar for stages that take so long, see `Overall`; after Ctrl-C say where what is finished is kept."""
    display = Overall(reporter, work, words)
    again = f"what is finished is kept in {directory}: {AGAIN}"
    with on_interruption(reporter, lambda: again), reporter.progress(lambda: display.title) as show:
        display.show = show
        yield display


class StageReporter:
    """A `Reporter` whose progress is that of a stage: each step does a `part` of what is left, and none goes back.

    `at` is told the share of the stage that is done, and what is being done.
    """

    def __init__(self, reporter: Reporter, at: Callable[[float, str], None]) -> None:
        self.reporter = reporter
        self.at = at
        self.part = 1.0
        self.done = 0.0

    def say(self, text: str) -> None:
        """Keep it: what a stage begins with and what it has kept is told once, of all stages."""

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
def going_on(place: Path, store: ReplyStore, replies: int, reporter: Reporter) -> Iterator[None]:
    """Say which of the `replies` are there already and, after Ctrl-C, how many are kept and how to go on."""
    if store.samples:
        reporter.say(f"going on with {place}: {len(store.samples)} replies are there, {replies} are needed")
    with on_interruption(reporter, lambda: f"{len(store.samples)} replies are kept in {place}: {AGAIN}"):
        yield


@contextmanager
def open_replies(
    directory: Path | None, config: RunConfig, replies: int, reporter: Reporter, force: bool = False
) -> Iterator[ReplyStore | None]:
    """Open the finished ones of the `replies` of a run, if they are kept; the run is sealed at the end.

    See `open_run` and `going_on`.
    """
    if directory is None:
        unkept = "nothing is kept without --output DIR, with which a run can go on where it stopped"
        with on_interruption(reporter, lambda: unkept):
            yield None
        return
    with open_run(directory, config, force) as (run, store), going_on(directory, store, replies, reporter):
        yield store
        run.finish()
    if run.state == "finished":
        reporter.say(FINISHED)


def stage_store(
    directory: Path,
    config_of: Callable[[Evaluation], RunConfig],
    reporter: Reporter,
    *,
    title: str = "",
    force: bool = False,
) -> StageStore:
    """Return what keeps the replies of every stage in a directory of its own, below `directory`.

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
            going_on(place, store, evaluation.replies, reporter),
        ):
            yield store, progress

    return open_replies
