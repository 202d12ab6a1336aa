"""How far a long command is: one display over all stages of a run, and a line per generation of a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from kvsearch.core.progress import Progress, SecondsLeft, Title
from kvsearch.jobs.reporter import Reporter, on_interruption
from kvsearch.runs.identity import BEST
from kvsearch.runs.run import write_json
from kvsearch.search.candidates import STARTS

if TYPE_CHECKING:
    from kvsearch.search.candidates import Candidate
    from kvsearch.search.trials import TrialLog

PARTS = 1000  # of the whole, as the display counts them
KEPT = 0.1  # share of its time in which a stage ends that was finished before


class Overall:
    """The stages of a long job by name, with the seconds that each is said to take; what was kept takes none.

    A share `trust` of the whole counts as done at the speed that was said: the time left follows what is seen. It is 0
    where stages have other weights than seconds.
    """

    def __init__(self, reporter: Reporter, work: Mapping[str, float], trust: float = 0.2) -> None:
        self.reporter = reporter
        self.work = work
        self.whole = sum(work.values())
        self.trusted = trust * self.whole
        self.show: Progress = lambda *_: None
        self.title = next(iter(work), "")
        self.done = 0.0
        self._kept = 0.0
        self._started = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[StageReporter]:
        """Begin a stage, and give whom its job talks to."""
        before = self.done
        began = time.monotonic()
        self.title = name
        self.reporter.say(f"stage {list(self.work).index(name) + 1} of {len(self.work)}: {name}")
        yield StageReporter(self.reporter, lambda share: self._at(before + share * self.work[name]))
        if time.monotonic() - began < KEPT * self.work[name]:
            self._kept += self.work[name]
        self._at(before + self.work[name])

    def left(self) -> float | None:
        """Return the seconds that are left, at the speed so far; None where that cannot be told yet."""
        done = self.done - self._kept + self.trusted
        if done <= 0:
            return None
        return (time.monotonic() - self._started + self.trusted) / done * (self.whole - self.done)

    def _at(self, done: float) -> None:
        self.done = max(self.done, done)
        self.show(round(PARTS * self.done / self.whole), PARTS)


@contextmanager
def overall(reporter: Reporter, work: Mapping[str, float], trust: float = 0.2) -> Iterator[Overall]:
    """Show one bar for stages that take so many seconds, see `Overall`."""
    display = Overall(reporter, work, trust=trust)
    with reporter.progress(lambda: display.title, display.left) as show:
        display.show = show
        yield display


class StageReporter:
    """A `Reporter` whose progress is that of a stage: each step does a `part` of what is left, and none goes back."""

    def __init__(self, reporter: Reporter, at: Callable[[float], None]) -> None:
        self.reporter = reporter
        self.at = at
        self.part = 1.0
        self.done = 0.0

    def say(self, text: str) -> None:
        """Keep it: what a stage begins with and what it has kept is told once, of all stages."""

    def warn(self, text: str) -> None:
        self.reporter.warn(text)

    @contextmanager
    def progress(self, what: Title, left: SecondsLeft | None = None) -> Iterator[Progress]:  # noqa: ARG002 - one display
        before = self.done

        def show(done: int, total: int) -> None:
            share = done / total if total else 1.0
            self.done = max(self.done, before + self.part * share * (1 - before))
            self.at(self.done)

        yield show

    def loading(self, name: str) -> AbstractContextManager[None]:
        return self.reporter.loading(name)


class SearchProgress:
    """Shows how far a search is on its way to at most `most` candidates; a `Watcher`."""

    def __init__(self, reporter: Reporter, log: TrialLog, most: int) -> None:
        self.reporter = reporter
        self.log = log
        self.most = most
        self.title = self.place = "search"
        self.failures = 0
        self.starts = math.nan
        self._open = ExitStack()
        self._show: Progress | None = None

    def stage(self, name: str) -> None:
        self.place = f"search, {name}"

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        self.failures += sum(not math.isfinite(value) for value in values)
        if stage == STARTS:
            self.starts = best.value
        place = self.place if stage == STARTS else f"{self.place}, generation {generation}"
        failed = f", {self.failures} failed" if self.failures else ""
        self.title = f"{place}, best {best.value:.6g} (best start {self.starts:.6g}){failed}"
        if self._show is None:
            self._show = self._open.enter_context(self.reporter.progress(lambda: self.title))
        self._show(min(self.log.spent.evaluations, self.most), self.most)

    def ended(self, why: str) -> None:
        self.close()
        self.reporter.say(f"search ended: {why}")

    def close(self) -> None:
        """Give the screen back."""
        self._open.close()
        self._show = None


@contextmanager
def watching(reporter: Reporter, log: TrialLog, most: int) -> Iterator[SearchProgress]:
    """Show how a search goes; after Ctrl-C write and say what is best so far, and how to go on."""
    watcher = SearchProgress(reporter, log, most)
    directory = log.path.parent

    def words() -> str:
        watcher.close()
        if (best := log.best) is not None:
            write_json(directory / BEST, {"value": best.value, "where": best.where, "budgets": best.candidate})
            reporter.say(f"best so far: {best.value:.6g} ({best.where}), in {directory / BEST}")
        return f"give the same command again to go on: what was measured is in {directory}"

    with closing(watcher), on_interruption(reporter, words):
        yield watcher
