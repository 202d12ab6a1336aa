"""How far a command is: a bar on a terminal; elsewhere, as in the log of a cluster, a line every half minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsearch.core.printed import visible_line
from kvsearch.core.progress import Progress, clock_words

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

EVERY = 30.0  # seconds between two lines


@dataclass
class Count:
    """How many units of `what` are done, and how long that took."""

    what: str
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    total: int | None = None
    _before: int | None = None  # what was done when this began: what is kept is found again in no time
    _started: float = field(init=False)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self._since = self.clock()

    def __call__(self, done: int, total: int) -> None:
        """Note how much of the total is done."""
        if self._before is None or done < self.done:  # another part begins
            self._before = done
            self._since = self.clock()
        self.done = done
        self.total = total

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self.clock() - self._started

    def words(self) -> str:
        """Return how far it is, with the time left at the speed so far, where that can be told."""
        if self.total is None:
            return f"{self.what}: begun {clock_words(self.spent)} ago"
        new = self.done - (self._before or 0)
        words = f"{self.what}: {self.done} of {self.total} in {clock_words(self.spent)}"
        if new <= 0:
            return words
        return f"{words}, about {clock_words((self.clock() - self._since) * (self.total - self.done) / new)} left"


@contextmanager
def lines(count: Count, say: Callable[[str], None], every: float = EVERY) -> Iterator[Progress]:
    """Say how far it is every so many seconds, from a thread of its own: one step may take long, too."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            say(count.words())

    thread = threading.Thread(target=tell, name="kvsearch-progress", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()


@contextmanager
def bar(count: Count, console: RichConsole) -> Iterator[Progress]:
    """Show a bar with the time left, in place."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Bars(*columns, console=console) as bars:
        task = bars.add_task(visible_line(count.what), total=None)

        def show(done: int, total: int) -> None:
            count(done, total)
            bars.update(task, completed=done, total=total)

        yield show
