"""SIGTERM and SIGHUP end a command as Ctrl-C does: what is kept is told, and how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal has come that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(error: KeyboardInterrupt) -> int:
    """Return 128 and the number of the signal."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """While this lasts, these signals raise `Stopped`, but for those that are ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as handlers are called
        raise Stopped(number)

    before: dict[int, Any] = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
