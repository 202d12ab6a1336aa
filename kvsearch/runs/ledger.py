"""What a run has done so far: a file of one JSON object per line, to which lines are only ever appended.

A line is on the disk before the run goes on. A torn last line, that of a process which was killed, is dropped: what it
held is done again. Any other line that does not parse is an error that names it. Lines have no checksums: the disk is
trusted, and where a run has finished `kvsearch.runs.run` keeps the checksum of the whole file.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvsearch.core.errors import UsageError
from kvsearch.core.files import read_bytes, write_fault
from kvsearch.core.resources import Closing

LedgerLine = TypeVar("LedgerLine")


class LedgerFormatError(Exception):
    """A line that does not belong to its ledger; the message says why."""


class Ledger(Closing, Generic[LedgerLine]):
    """The lines of a run, in the file `path`, which stays open until `close`.

    Of the lines nothing stays in memory but what `_note` takes in, so a run may have any number of them.

    The caller has the lock of the directory, see `kvsearch.runs.lock`.

    Raises:
        UsageError: a line is damaged and not only cut short.
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0  # of lines
        self._size = 0
        try:
            self._file = path.open("a+b", buffering=0)  # a buffer would be written again after a failure
        except OSError as error:
            raise write_fault(error, path, self.go_on) from error
        try:
            data = path.read_bytes()
            for line, size in parse_lines(data, path, self.parse):
                self._take(line, size)
            if self._size < len(data):
                self._file.truncate(self._size)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @staticmethod
    @abstractmethod
    def parse(content: dict[str, Any]) -> LedgerLine:
        """Parse a ledger line's JSON; raises `LedgerFormatError` for a bad line."""

    @property
    @abstractmethod
    def go_on(self) -> str:
        """How to go on after the disk was full, for people."""

    def _append(self, line: LedgerLine, text: str) -> None:
        """Write a line as `text`, a JSON object; it is on the disk when this returns.

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
        self._take(line, len(data))

    def _take(self, line: LedgerLine, size: int) -> None:
        self.count += 1
        self._size += size
        self._note(line)

    @abstractmethod
    def _note(self, line: LedgerLine) -> None:
        """Take in what has to be known of a line that was read or written; its number is the `count`."""


def parse_lines(
    data: bytes, path: Path, parse: Callable[[dict[str, Any]], LedgerLine]
) -> Iterator[tuple[LedgerLine, int]]:
    """Yield the complete lines of a ledger as `parse` makes them of their JSON, and their sizes in bytes.

    The last one may be torn: it is left out.

    Raises:
        UsageError: any other line is no JSON object, or `parse` raises `LedgerFormatError` for it.
    """
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:  # after a power failure a file may have its length before its content
                return
            raise damaged_line_error(path, number, "it is no JSON") from None
        try:
            if not isinstance(content, dict):
                raise LedgerFormatError("it is no JSON object")
            parsed = parse(content)
        except LedgerFormatError as problem:
            raise damaged_line_error(path, number, str(problem)) from None
        yield parsed, len(line) + 1


def read_lines(path: Path, parse: Callable[[dict[str, Any]], LedgerLine]) -> Iterator[LedgerLine]:
    """Yield the lines of the ledger at `path`; nothing is written.

    Raises:
        UsageError: as for `parse_lines`, or there is no such file.
        EnvironmentFault: it cannot be read.
    """
    return (line for line, _ in parse_lines(read_bytes(path), path, parse))


def damaged_line_error(path: Path, line: int, problem: str) -> UsageError:
    """Make the error about a line that does not parse; lines count from 1."""
    before = "delete this line and all after it, which are then done again, " if line > 1 else ""
    return UsageError(
        f"{path}, line {line} is damaged ({problem}): restore the file, {before}or start anew with another --output "
        "or --force"
    )
