"""How a search goes, while it goes: a line per generation, in place on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from kvsearch.jobs.stages import on_interruption
from kvsearch.jobs.talk import Talk
from kvsearch.progress import clock_words

if TYPE_CHECKING:
    from kvsearch.search.candidates import Candidate
    from kvsearch.search.ledger import SearchLedger, SearchRun
    from kvsearch.search.loop import Part
    from kvsearch.search.settings import SearchLimits


class SearchProgress:
    """Tells of a search; a `Watcher`."""

    def __init__(self, talk: Talk, ledger: SearchLedger, limits: SearchLimits, searches: int = 1) -> None:
        self.talk, self.ledger, self.limits, self.searches = talk, ledger, limits, searches
        self.where, self.failures, self.starts = "", 0, math.nan
        self.part: Part | None = None
        self.ends = 0
        self._open = ExitStack()
        self._show: Callable[[Sequence[str]], None] | None = None

    def stage(self, name: str, part: Part | None = None) -> None:
        """See `Watcher`."""
        self.where, self.part = name, part

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        """See `Watcher`."""
        from kvsearch.search.candidates import STARTS

        self.failures += sum(not math.isfinite(value) for value in values)
        place = self.where
        if stage == STARTS:
            self.starts = best.value
        else:
            place += f", generation {generation}"
            place += f" (last {self.part.generations - 1})" if self.part is not None else ""
        if self._show is None:
            self._show = self._open.enter_context(self.talk.live("kvsearch evolve"))
        found = f"best {best.value:.6g} ({best.where}; best start {self.starts:.6g})"
        failed = [f"{self.failures} failed"] if self.failures else []
        self._show([place, found, *self._used(), *failed, *self._left(generation)])

    def ended(self, why: str) -> None:
        """See `Watcher`; gives the screen back."""
        self.close()
        self.ends += 1
        self.talk.say(f"search ended: {why}")

    def close(self) -> None:
        """Give the screen back."""
        self._open.close()
        self._show = None

    def _used(self) -> Iterator[str]:
        spent, limits = self.ledger.spent, self.limits
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
        spent, limits = self.ledger.spent, self.limits
        shares = [(self.ends + self.part.done(generation)) / self.searches]
        for used, most in ((spent.evaluations, limits.evaluations), (spent.tokens, limits.tokens)):
            shares += [] if most is None else [used / most]
        share = max(shares)
        left = spent.seconds * (1 - share) / share if share < 1 else 0.0
        if limits.seconds is not None:
            left = min(left, max(0.0, limits.seconds - spent.seconds))
        yield f"at most {clock_words(left)} left"


@contextmanager
def watching(talk: Talk, run: SearchRun, limits: SearchLimits, searches: int = 1) -> Iterator[SearchProgress]:
    """Show how a search goes; after Ctrl-C write and say what is best so far, and how to go on."""
    from kvsearch.runs.directory import write_json
    from kvsearch.search.ledger import BEST

    watcher = SearchProgress(talk, run.ledger, limits, searches)

    def words() -> str:
        watcher.close()
        if (best := run.ledger.best) is not None:
            write_json(run.directory / BEST, {"value": best.value, "where": best.where, "budgets": best.candidate})
            talk.say(f"best so far: {best.value:.6g} ({best.where}), in {run.directory / BEST}")
        return f"go on with --resume: what was measured is in {run.directory}"

    with closing(watcher), on_interruption(talk, words):
        yield watcher
