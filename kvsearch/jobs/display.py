"""How far a long command is: one display over all stages of a run, and a line per generation of a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsearch.core.progress import Progress, clock_words
from kvsearch.jobs.reporter import Reporter, on_interruption
from kvsearch.runs.identity import BEST
from kvsearch.runs.run import write_json
from kvsearch.search.candidates import STARTS

if TYPE_CHECKING:
    from kvsearch.search.candidates import Candidate
    from kvsearch.search.settings import SearchLimits
    from kvsearch.search.stages import SearchStage
    from kvsearch.search.trials import TrialLog

PARTS = 1000  # of the whole, as the display counts them


class Overall:
    """Stages by name, each with its share of the `work` in any unit; those that were finished before take no time."""

    def __init__(
        self, reporter: Reporter, work: Mapping[str, float], show: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reporter = reporter
        self.work = work
        self.show = show
        self.clock = clock
        self.done = 0.0
        self._begun = 0
        self._started = clock()

    @contextmanager
    def stage(self, name: str, words: str) -> Iterator[StageReporter]:
        """Begin a stage, and give whom its job talks to."""
        self._begun += 1
        before = self.done
        left = ""  # the time that is left at the speed so far, once anything is done
        spent = self.clock() - self._started
        if before > 0 and spent >= 1:
            seconds = round(spent * (sum(self.work.values()) - before) / before)
            left = f" (about {seconds // 60}:{seconds % 60:02d} left)"
        self.reporter.say(f"{self._begun}/{len(self.work)} {words}{left}")
        yield StageReporter(self.reporter, lambda share: self._at(before + share * self.work[name]))
        self._at(before + self.work[name])

    def _at(self, done: float) -> None:
        self.done = max(self.done, done)
        self.show(round(PARTS * self.done / sum(self.work.values())), PARTS)


@contextmanager
def overall(reporter: Reporter, work: Mapping[str, float]) -> Iterator[Overall]:
    """Show one bar for stages with these shares of the work."""
    with reporter.progress("parts in 1000") as show:
        yield Overall(reporter, work, show)


@dataclass(frozen=True)
class StageReporter:
    """A `Reporter` whose progress is that of a stage; what its steps count from 0 again does not go back."""

    reporter: Reporter
    at: Callable[[float], None]

    def part(self, begin: float, share: float) -> StageReporter:
        """Return the reporter of a part of the stage, which has that `share` of its work."""
        return StageReporter(self.reporter, lambda done: self.at(begin + share * done))

    def say(self, text: str) -> None:
        """Keep it: what a stage begins with and what it has kept is told once, of all stages."""

    def warn(self, text: str) -> None:
        self.reporter.warn(text)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:  # noqa: ARG002 - there is one display
        yield lambda done, total: self.at(done / total if total else 1.0)

    def live(self, title: str) -> AbstractContextManager[Callable[[Sequence[str]], None]]:
        return self.reporter.live(title)

    def loading(self, name: str) -> AbstractContextManager[None]:
        return self.reporter.loading(name)


class SearchProgress:
    """Tells of a search; a `Watcher`."""

    def __init__(self, reporter: Reporter, log: TrialLog, limits: SearchLimits, searches: int = 1) -> None:
        self.reporter = reporter
        self.log = log
        self.limits = limits
        self.searches = searches
        self.where = ""
        self.failures = 0
        self.starts = math.nan
        self.part: SearchStage | None = None
        self.ends = 0
        self._open = ExitStack()
        self._show: Callable[[Sequence[str]], None] | None = None

    def stage(self, name: str, part: SearchStage | None = None) -> None:
        self.where = name
        self.part = part

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        self.failures += sum(not math.isfinite(value) for value in values)
        place = self.where
        if stage == STARTS:
            self.starts = best.value
        else:
            place += f", generation {generation}"
            place += f" (last {self.part.generations - 1})" if self.part is not None else ""
        if self._show is None:
            self._show = self._open.enter_context(self.reporter.live("kvsearch evolve"))
        found = f"best {best.value:.6g} ({best.where}; best start {self.starts:.6g})"
        failed = [f"{self.failures} failed"] if self.failures else []
        self._show([place, found, *self._used(), *failed, *self._left(generation)])

    def ended(self, why: str) -> None:
        self.close()
        self.ends += 1
        self.reporter.say(f"search ended: {why}")

    def close(self) -> None:
        """Give the screen back."""
        self._open.close()
        self._show = None

    def _used(self) -> Iterator[str]:
        spent = self.log.spent
        limits = self.limits
        for name, used, most in (
            ("candidates", spent.evaluations, limits.evaluations),
            ("seconds", spent.seconds, limits.seconds),
            ("tokens", spent.tokens, limits.tokens),
        ):
            yield f"{name} {used:,.0f}" + ("" if most is None else f" of {most:,.0f}")

    def _left(self, generation: int) -> Iterator[str]:
        """Yield about how long the search still takes at the most, from what all its sessions took."""
        if self.part is None:
            return
        spent = self.log.spent
        limits = self.limits
        shares = [(self.ends + self.part.done(generation)) / self.searches]
        for used, most in ((spent.evaluations, limits.evaluations), (spent.tokens, limits.tokens)):
            shares += [] if most is None else [used / most]
        share = max(shares)
        left = spent.seconds * (1 - share) / share if share < 1 else 0.0
        if limits.seconds is not None:
            left = min(left, max(0.0, limits.seconds - spent.seconds))
        yield f"at most {clock_words(left)} left"


@contextmanager
def watching(reporter: Reporter, log: TrialLog, limits: SearchLimits, searches: int = 1) -> Iterator[SearchProgress]:
    """Show how a search goes; after Ctrl-C write and say what is best so far, and how to go on."""
    watcher = SearchProgress(reporter, log, limits, searches)
    directory = log.path.parent

    def words() -> str:
        watcher.close()
        if (best := log.best) is not None:
            write_json(directory / BEST, {"value": best.value, "where": best.where, "budgets": best.candidate})
            reporter.say(f"best so far: {best.value:.6g} ({best.where}), in {directory / BEST}")
        return f"give the same command again to go on: what was measured is in {directory}"

    with closing(watcher), on_interruption(reporter, words):
        yield watcher
