"""The console of a command: its output channels, log, progress and exit codes, and the options of every command.

Data goes to standard output, what is said of the work to standard error. Exit codes: 0 done, 1 our bug, 2 usage or
configuration, 3 the environment, 4 model or data incompatible, 128 + n stopped by signal n (130 by Ctrl-C).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kvsearch.cli.streams import describe_os_error, print_error, stop_on_signals
from kvsearch.core.errors import EnvironmentFault, KvsearchError, KvsearchWarning, UsageError
from kvsearch.core.files import TYPED, check_target
from kvsearch.core.items import Progress, Title, describe_item, format_clock
from kvsearch.core.printed import escape_invisible, escape_line, escape_reply, truncate_lines
from kvsearch.core.resources import read_package_version
from kvsearch.models.memory import is_out_of_memory
from kvsearch.report.screen import WIDEST_PAGE
from kvsearch.runs.lock import find_own_command

if TYPE_CHECKING:
    from kvsearch.report.figures import ReportPart

BUG = 1
LOGGER = logging.getLogger("kvsearch")
SHOWN = {"shown": True}  # of a record that is on the screen already


class Screen(RichConsole):
    """A rich console that makes control characters visible; all output for people goes through one.

    Texts are made visible before they are laid out, so that columns are as wide as what is shown; what a renderable
    brings ready-made is made visible when it is drawn.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text that shows every character of `text`."""
        return super().render_str(escape_invisible(text), **{**how, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is drawn: styles and moves of the cursor are rich's own, all else is text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_invisible(segment.text))

    def print_parts(self, parts: Iterable[ReportPart]) -> None:
        """Print lines and facts, which are never broken, tables and maps."""
        from kvsearch.report.screen import align_facts, to_printable

        for part in parts:
            if isinstance(part, str | Mapping):
                for line in [part] if isinstance(part, str) else align_facts(part):
                    self.print(escape_line(line), soft_wrap=True)
            else:
                self.print(to_printable(part))

    def on_broken_pipe(self) -> None:
        """End the output, not the process: rich would exit with 1."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError


@dataclass(frozen=True)
class Console:
    """The options of all commands, and where their output goes; a `Reporter` for jobs."""

    as_json: bool = False
    dry_run: bool = False
    quiet: bool = False
    verbose: bool = False
    log_file: Path | str | None = None
    debug: bool = False

    @functools.cached_property
    def reporter(self) -> Screen:
        """The console for people, on standard error."""
        return Screen(stderr=True, quiet=self.quiet)

    @functools.cached_property
    def out(self) -> Screen:
        """The console for results, on standard output; as wide as any table where it is not a terminal."""
        return Screen(width=None if sys.stdout.isatty() else WIDEST_PAGE)

    def say(self, text: str) -> None:
        """Print a message that is not a result."""
        self.reporter.print(escape_line(text), soft_wrap=True)
        LOGGER.info("%s", text, extra=SHOWN)

    def warn(self, text: str) -> None:
        """Print a warning on one line."""
        self.reporter.print(truncate_lines(f"kvsearch: warning: {text}"), soft_wrap=True)
        LOGGER.warning("%s", text, extra=SHOWN)

    def print_result(
        self,
        as_json: Callable[[], Any],
        parts: Callable[[], Iterable[ReportPart]] = tuple,
        remarks: Iterable[str] = (),
        problem: KvsearchError | None = None,
    ) -> None:
        """Print the result of a command, as JSON if requested, then remarks on it.

        Args:
            as_json: returns the result for --json.
            parts: returns what people see in its place, where remarks do not say all.
            remarks: said after either, the commands that naturally follow last.
            problem: raised when all is said, as the exit code tells of it, too.
        """
        if self.as_json:
            self.print_json(as_json())
        else:
            self.out.print_parts(parts())
        for remark in remarks:
            self.say(remark)
        if problem is not None:
            raise problem

    def print_json(self, data: Any) -> None:
        """Print a result as JSON on standard output."""
        text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)  # ASCII, all but one of it visible
        _write(text.replace("\x7f", "\\u007f"))

    def print_reply(self, text: str) -> None:
        """Print a reply of a model: unchanged for programs, with visible control characters on a terminal."""
        shown = escape_reply(text) if sys.stdout.isatty() else text.encode(errors="backslashreplace").decode()
        _write(shown)

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Keep transformers from printing while a model is loaded, unless `verbose`."""
        from transformers.utils import logging as transformers_logging

        if not self.verbose:
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
        count = Count(f"loading {name}")
        with self._log_times(count), print_lines(count, self.say) if not self._on_terminal else nullcontext():
            yield

    @contextmanager
    def progress(self, what: Title) -> Iterator[Progress]:
        """Show progress: a bar on a terminal, a line every half minute elsewhere."""
        count = Count(what)
        with (
            self._log_times(count),
            show_bar(count, self.reporter) if self._on_terminal else print_lines(count, self.say) as shown,
        ):
            yield shown

    @property
    def _on_terminal(self) -> bool:
        return self.reporter.is_terminal and not self.quiet

    @contextmanager
    def _log_times(self, count: Count) -> Iterator[None]:
        """Log the begin and end of a step, with its time."""
        LOGGER.debug("%s: begin", count.title)
        yield
        done = "" if count.total is None else f" {count.done} of {count.total}"
        LOGGER.debug("%s:%s done in %.2f s", count.title, done, count.spent)

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Print errors of a command on one line, and end it with their exit code."""
        try:
            set_up_log(self.verbose, None if self.log_file is None else Path(self.log_file))
            with self._showing_warnings(), stop_on_signals():
                yield
        except KeyboardInterrupt as stop:
            name = str(stop)
            print_error(f"{f'stopped by {name}' if name else 'interrupted'}: nothing half-written was left behind")
            raise typer.Exit(128 + signal.Signals[name or "SIGINT"]) from None
        except BrokenPipeError:
            pass  # whoever read our output has seen enough
        except Exception as error:  # the last line of defence: a bug must not look like a usage error
            message, code = describe_failure(error)
            LOGGER.error("%s", message, exc_info=error, extra=SHOWN)
            if self.debug:
                sys.stderr.write(escape_invisible("".join(traceback.format_exception(error))))
            print_error(message)
            raise typer.Exit(code) from None

    @contextmanager
    def _showing_warnings(self) -> Iterator[None]:
        """Show our warnings by `warn`; warnings of other packages are shown as usual."""
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, KvsearchWarning):
                    self.warn(str(message))
                else:
                    show_others(escape_invisible(str(message)), category, *place, **more)

            warnings.showwarning = show
            warnings.simplefilter("always", KvsearchWarning)
            # the older transformers that are supported know no other name
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            yield


def describe_failure(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of a command that ends with an error."""
    if isinstance(error, KvsearchError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        kind = UsageError if error.errno in TYPED else EnvironmentFault
        return describe_os_error(error), kind.exit_code
    if is_out_of_memory(error):
        return "out of memory: use a smaller --batch, model or --dtype", EnvironmentFault.exit_code
    return f"a bug in kvsearch, please report it ({type(error).__name__}: {error})", BUG


def _write(text: str) -> None:
    """Write to standard output at once, so that it stands before what follows on either stream."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- the log: --log-file has all that is said and done, with times; -v shows it -------------------------


class VisibleFormatter(logging.Formatter):
    """Formats records with visible control characters, so that no message begins a new line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        return escape_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return escape_invisible(super().formatException(ei))


class LogFile(logging.FileHandler):
    """A log file that is closed with one message if its disk is full; the command goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - the name that logging calls
        LOGGER.removeHandler(self)
        reason = sys.exc_info()[1]
        print_error(f"the log {self.baseFilename} ends here: {reason}", "warning")


def set_up_log(verbose: bool, path: Path | None) -> None:
    """Set up logging to the screen, if `verbose`, and to the end of a file.

    Raises:
        UsageError: the file cannot be written.
    """
    LOGGER.propagate = False
    for handler in LOGGER.handlers:
        with suppress(OSError):
            handler.close()
    LOGGER.handlers = [logging.NullHandler()]
    LOGGER.setLevel(logging.DEBUG if verbose or path is not None else logging.INFO)
    if verbose:
        screen = logging.StreamHandler()
        screen.addFilter(lambda record: not hasattr(record, "shown"))
        screen.setFormatter(VisibleFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(screen)
    if path is not None:
        check_target(path)
        file = LogFile(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
        LOGGER.addHandler(file)
        command = " ".join(find_own_command())
        LOGGER.info("kvsearch began: %s (%s on %s)", command, read_package_version(), platform.node(), extra=SHOWN)


# --- progress: a bar on a terminal; elsewhere, as in the log of a cluster, a line every half minute -------------------

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
