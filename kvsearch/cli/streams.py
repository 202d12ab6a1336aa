"""What is around a command: its output streams as they are, closed or full, and signals that end it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.printed import truncate_lines

# what says how OpenMP's threads wait: of any OpenMP, GNU's, Intel's
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class StandardOutput:
    """Standard output with errors that name it; everything else is delegated to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text == "":  # as libraries do to find out what kind of stream it is, and forget the error
            return 0
        written: int = self._guarded(lambda: self._stream.write(text))
        return written

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except OSError as error:
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - one error is enough
            # of the same kind: that of a broken pipe is told from others
            raise OSError(error.errno, error.strerror, "standard output") from error


class StandardError(StandardOutput):
    """Standard error that ignores errors: a closed reader neither ends the command nor changes its exit code."""

    def _guarded(self, function: Callable[[], Any]) -> Any:
        with suppress(OSError):
            return function()
        return 0


def prepare_streams() -> None:
    """Prepare both output streams so that a command can always write to them.

    A closed one takes everything and keeps nothing. Letters that an encoding does not have become escapes.
    """
    for name, kind in (("stdout", StandardOutput), ("stderr", StandardError)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for as long as the process lasts
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, kind(stream))


def let_threads_sleep() -> None:
    """Let threads of a processor that wait for each other sleep, unless the user has said how they wait.

    PyTorch's are OpenMP's, which would spin: where another process has one of the cores, all others do so for as long
    as it runs, which takes several times the processor time of the work. It is read when PyTorch is imported.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = "passive"


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Prepare the streams for a command; help that cannot be printed is an error of the environment, as results are."""
    let_threads_sleep()
    prepare_streams()
    try:
        yield
    except OSError as error:
        print_error(describe_os_error(error))
        sys.exit(EnvironmentFault.exit_code)


def describe_os_error(error: OSError) -> str:
    """Describe an operating system error, with its file."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def print_error(message: str, kind: str = "error") -> None:
    """Print an error on one line, even with `--quiet`."""
    sys.stderr.write(f"{truncate_lines(f'kvsearch: {kind}: {message}')}\n")


# --- signals that end a command -------------------------------------------------------------------------


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """End the command by SIGTERM and SIGHUP as by Ctrl-C, but for those that are ignored, as under nohup."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    handlers: dict[int, Any] = {}
    endings: tuple[int, ...] = (signal.SIGTERM, signal.SIGHUP)
    for number in endings:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
