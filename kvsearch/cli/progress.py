"""Progress of a command: a bar on a terminal; elsewhere, as in the log of a cluster, a line every half minute."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvsearch.core.items import Progress, Title, describe_item, format_clock
from kvsearch.core.printed import escape_line

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

LINE_INTERVAL = 30.0  # seconds between two lines
MIN_SHARE = 0.05  # share that is done before a time left is told
SLACK = 0.1  # of the time left: an end that is later by less is no news
SLOWER = "slower than before"
FURTHER = "a further part has begun"
LONGER = "longer than was said"


class Count:
    """Counts the finished part of `what`, and estimates the time left from the speed so far.

    The time left that is shown falls with the clock, also while one long step shows nothing; where it has to rise, it
    says why: the work is slower than before, or a further part has begun.
    """

    def __init__(self, what: Title, clock: Callable[[], float] = time.monotonic) -> None:
        self.what = what
        self.clock = clock
        self.done = 0
        self.total: int | None = None
        self._before: int | None = None  # what was done when this began: what is kept is found again in no time
        self._started = self._since = clock()
        self._end: float | None = None  # when all of this part is done, by the speed at its last step
        self._shown_end = math.inf  # the end that was shown
        self._reason = SLOWER  # why the next end that is shown is later, if it is
        self._told = ""  # why the end that is shown is later than the one before

    def __call__(self, done: int, total: int) -> None:
        """Update the finished count and the total."""
        if self._before is None or done < self.done:  # another part begins
            self._reason = SLOWER if self._before is None else FURTHER
            self._before = done
            self._since = self.clock()
            self._end = None
        new = done - self._before
        is_news = done > self.done  # what is told again says nothing of the speed
        self.done = done
        self.total = total
        if is_news and new > 0 and new >= MIN_SHARE * (total - self._before):  # of what was kept nothing is new
            now = self.clock()
            self._end = now + (now - self._since) * (total - done) / new

    @property
    def title(self) -> str:
        """The current step, with its number."""
        if self.total is None:
            return self.what if isinstance(self.what, str) else self.what()
        return describe_item(self.what, self.done, self.total)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._started

    def time_left(self) -> str:
        """Estimate the time left, in words; empty before a twentieth of the part is done."""
        if self._end is None:
            return ""
        now = self.clock()
        is_later = self._end > self._shown_end
        if not is_later or self._end - self._shown_end > SLACK * (self._end - now):
            self._told = f", {self._reason}" if is_later else ""
            self._shown_end = self._end
            self._reason = SLOWER
        if self._shown_end < now:
            return LONGER
        return f"about {format_clock(self._shown_end - now)} left{self._told}"

    def describe(self) -> str:
        """Describe the progress, with the time left if it can be estimated."""
        if self.total is None:
            return f"{self.title}: begun {format_clock(self.spent)} ago"
        share = self.done / self.total if self.total else 1.0
        return ", ".join(filter(None, (f"{self.title}: {share:.0%} in {format_clock(self.spent)}", self.time_left())))


@contextmanager
def print_lines(count: Count, say: Callable[[str], None], every: float = LINE_INTERVAL) -> Iterator[Progress]:
    """Print the progress every `every` seconds, from a thread, as one step may take long."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            say(count.describe())

    thread = threading.Thread(target=tell, name="kvsearch-progress", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()


@contextmanager
def show_bar(count: Count, console: RichConsole) -> Iterator[Progress]:
    """Show a bar with the time left, in place."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )  # fmt: skip
    with Bars(*columns, console=console) as bars:
        task = bars.add_task(escape_line(count.title), total=None, left="")

        def show(done: int, total: int) -> None:
            count(done, total)
            bars.update(task, description=escape_line(count.title), completed=done, total=total, left=count.time_left())

        yield show
