"""The log of a command: what it says and what it does, with times; --log-file has all of it, -v shows it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvsearch.plan.files import Kind, check_target, require_kind
from kvsearch.printed import visible, visible_line
from kvsearch.runs.holder import this_command

LOGGER = logging.getLogger("kvsearch")
BEGUN = "kvsearch began"
LOG_FILE = Kind("a log of kvsearch", BEGUN.encode())
SHOWN = {"shown": True}  # of a record that is on the screen already


class Lines(logging.Formatter):
    """Records that are shown as data: no message begins a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        """Return the line of a record."""
        return visible_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return a traceback."""
        return visible(super().formatException(ei))


def tame(package: str) -> None:
    """Have what a package logs on the screen shown as data, too: its messages name files and what is in them."""
    for handler in logging.getLogger(package).handlers:
        handler.setFormatter(Lines(f"[{package}] %(message)s"))


class LogFile(logging.FileHandler):
    """A log that ends where it cannot be written, as the disk is full: one line says so, and the command goes on."""

    def close(self) -> None:
        """Close the file, and once more try to write what could not be written."""
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - the name that logging calls
        """Say what went wrong, and give the file up."""
        LOGGER.removeHandler(self)
        self.close()
        error = sys.exc_info()[1]
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        told = visible_line(f"kvsearch: warning: cannot write {self.baseFilename}: {reason}; the log ends there")
        sys.stderr.write(f"{told}\n")


def set_up(verbose: bool, path: Path | None) -> None:
    """Send what is logged from now on to the screen, if that is wanted, and to the end of a file.

    Raises:
        UsageError: the file cannot be written, or holds something else than logs of kvsearch.
    """
    LOGGER.propagate = False
    for handler in LOGGER.handlers:
        handler.close()
    LOGGER.handlers = [logging.NullHandler()]
    LOGGER.setLevel(logging.DEBUG if verbose or path is not None else logging.INFO)
    if verbose:
        screen = logging.StreamHandler()
        screen.addFilter(lambda record: not getattr(record, "shown", False))
        screen.setFormatter(Lines("%(asctime)s %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(screen)
    if path is not None:
        check_target(path)
        require_kind(path, LOG_FILE)
        file = LogFile(path, encoding="utf-8")
        file.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
        LOGGER.addHandler(file)
        LOGGER.info("%s: %s", BEGUN, " ".join(this_command()), extra=SHOWN)
