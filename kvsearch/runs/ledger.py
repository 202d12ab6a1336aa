"""What a run has done so far: a file of one JSON object per line, to which lines are only ever appended.

A line is on the disk before the run goes on. A last line that was cut short, that of a process which was killed, is
dropped: what it held is done again. Any other line that is not what its ledger writes is refused.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvsearch.errors import UsageError
from kvsearch.plan.files import write_fault

Line = TypeVar("Line")


class Unfit(Exception):
    """A line that is none of its file; the message says why."""


class Ledger(ABC, Generic[Line]):
    """The lines of a run, in memory and in the file `path`, which stays open until `close`.

    The caller has the lock of the directory, see `kvsearch.runs.lock`.

    Raises:
        UsageError: a line is damaged and not only cut short.
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list[Line]()
        self._size = 0
        try:
            self._file = path.open("a+b", buffering=0)  # a buffer would be written again after a failure
        except OSError as error:
            raise write_fault(error, path, self.go_on) from error
        try:
            data = path.read_bytes()
            for size, line in parsed_lines(data, path, self.parse):
                self._size += size
                self._note(line)
            if self._size < len(data):
                self._file.truncate(self._size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @staticmethod
    @abstractmethod
    def parse(content: Any) -> Line:
        """Return the line of what JSON has; raises `Unfit` if it is none."""

    @property
    @abstractmethod
    def go_on(self) -> str:
        """How to go on after the disk was full, for people."""

    def _append(self, line: Line, text: str) -> None:
        """Write a line as JSON `text`; it is on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or the file cannot be written; what was written before is kept.
        """
        data = text.encode() + b"\n"
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except BaseException as error:
            with suppress(OSError):  # else the next session drops the torn line
                self._file.truncate(self._size)
            if isinstance(error, OSError):
                raise write_fault(error, self.path, self.go_on) from error
            raise
        self._size += len(data)
        self._note(line)

    def _note(self, line: Line) -> None:
        """Take in a line that was read or written."""
        self.lines.append(line)


def parsed_lines(data: bytes, path: Path, parse: Callable[[Any], Line]) -> Iterator[tuple[int, Line]]:
    """Yield the complete lines of a ledger as `parse` makes them of their JSON, with their sizes in bytes.

    The last one may be broken: it is left out.

    Raises:
        UsageError: any other line is no JSON, or `parse` raises `Unfit` for it.
    """
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                return
            raise damaged(path, number, "it is no JSON") from None
        try:
            found = parse(content)
        except Unfit as problem:
            raise damaged(path, number, str(problem)) from None
        yield len(line) + 1, found


def damaged(path: Path, line: int, problem: str) -> UsageError:
    """Return what to say of a line that somebody changed; lines count from 1."""
    return UsageError(
        f"{path}, line {line} is damaged ({problem}): restore the file, or start anew with another --output or --force"
    )
