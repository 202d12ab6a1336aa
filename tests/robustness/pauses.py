"""A command that is stopped before an operation on a file, until it is let go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.robustness.operations import Watch
from tests.robustness.processes import Ended, start


@dataclass
class Stop(Watch):
    """Says that it has come to the operation with the number `at`, and waits there; 0 is none."""

    at: int = 0
    arrived: tuple[int, int] = field(default_factory=os.pipe)
    let_go: tuple[int, int] = field(default_factory=os.pipe)

    def operation(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        super().operation(name, half)
        if len(self.names) == self.at:
            os.write(self.arrived[1], b".")
            os.read(self.let_go[0], 1)


class Paused:
    """A command in a process of its own, with a stop."""

    def __init__(self, folder: Path, words: Sequence[str], name: str, at: int) -> None:
        self.folder, self.words, self.name, self.at = folder, words, name, at

    def begin(self) -> None:
        """Let it work until it is stopped, or has ended."""
        self.stop = Stop(self.folder, at=self.at)
        self.process = start(self.stop, self.words, self.name)
        os.close(self.stop.arrived[1])  # so that the end of the process ends the wait
        os.read(self.stop.arrived[0], 1)

    def end(self) -> Ended:
        """Let it go, and wait for it."""
        os.write(self.stop.let_go[1], b".")
        ended = self.process.end()
        for number in (self.stop.arrived[0], *self.stop.let_go):
            os.close(number)
        return ended
