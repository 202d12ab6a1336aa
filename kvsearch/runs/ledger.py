"""What a run has done so far: a file of one JSON object per line, to which lines are only ever appended.

A line is on the disk before the run goes on. A last line that was cut short, that of a process which was killed, is
dropped: what it held is done again. Any other line that is not what its ledger has written, in this place and for this
run, is refused: see `kvsearch.runs.chain`.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from kvsearch.closing import Closing
from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan.files import read_bytes, write_fault
from kvsearch.runs.chain import Link, Unfit, unchained
from kvsearch.runs.identity import read_identity
from kvsearch.runs.lock import require_standing

Line = TypeVar("Line")


class Ledger(Closing, Generic[Line]):
    """The lines of a run, in the file `path`, which stays open until `close`.

    Of the lines nothing stays in memory but where they are: what has to be known of all of them is up to `_note`, and a
    single one is read again with `line`. So a run may have any number of them.

    The caller has the lock of the directory, see `kvsearch.runs.lock`. `identity` is that of the run, see `RunConfig`;
    empty for lines that belong to none.

    Raises:
        UsageError: a line is damaged and not only cut short, or it is the ledger of another run.
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(self, path: Path, identity: str = "") -> None:
        self.path, self._ends, self._last = path, array("Q"), Link(0, identity)
        try:
            self._file = path.open("a+b", buffering=0)  # a buffer would be written again after a failure
        except OSError as error:
            raise write_fault(error, path, self.go_on) from error
        try:
            data = path.read_bytes()
            for found in parsed_lines(data, path, self.parse, identity):
                self._take(found.line, found.size, found.link)
            if self._size < len(data):
                self._file.truncate(self._size)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def count(self) -> int:
        """How many lines there are."""
        return len(self._ends)

    def line(self, number: int) -> Line:
        """Return a line, counted from 1, as it is in the file."""
        start = self._ends[number - 2] if number > 1 else 0
        content = json.loads(os.pread(self._file.fileno(), self._ends[number - 1] - start, start))
        return self.parse(unchained(content))

    @staticmethod
    @abstractmethod
    def parse(content: dict[str, Any]) -> Line:
        """Return the line of what JSON has, without number and checksum; raises `Unfit` if it is none."""

    @property
    @abstractmethod
    def go_on(self) -> str:
        """How to go on after the disk was full, for people."""

    def _append(self, line: Line, text: str) -> None:
        """Write a line as `text`, a JSON object; it is on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or the file cannot be written; what was written before is kept.
        """
        self._require_there()
        sealed, link = self._last.seal(text)
        data = sealed + b"\n"
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
        self._take(line, len(data), link)

    def _require_there(self) -> None:
        """Raise EnvironmentFault if the file, or the lock, is not where it was: what is written would be lost."""
        require_standing(self.path.parent)
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return
        raise EnvironmentFault(
            f"{self.path} was removed or replaced while this command was writing there: give the same command again to "
            "begin anew"
        )

    @property
    def _size(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _take(self, line: Line, size: int, link: Link) -> None:
        self._ends.append(self._size + size)
        self._last = link
        self._note(line)

    @abstractmethod
    def _note(self, line: Line) -> None:
        """Take in what has to be known of a line that was read or written; its number is the `count`."""


class Parsed(NamedTuple, Generic[Line]):
    """A line that was read, where it stands in the chain, and its size in bytes."""

    line: Line
    link: Link
    size: int


def parsed_lines(
    data: bytes, path: Path, parse: Callable[[dict[str, Any]], Line], identity: str = ""
) -> Iterator[Parsed[Line]]:
    """Yield the complete lines of a ledger as `parse` makes them of their JSON.

    The last one may be broken: it is left out.

    Raises:
        UsageError: any other line is no JSON, is not chained to the one before it, or `parse` raises `Unfit` for it.
    """
    lines, link = data.split(b"\n"), Link(0, identity)
    for number, line in enumerate(lines[:-1], 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                return
            raise damaged(path, number, "it is no JSON") from None
        try:
            link = link.check(line, content)
            found = parse(content)
        except Unfit as problem:
            raise damaged(path, number, str(problem)) from None
        yield Parsed(found, link, len(line) + 1)


def read_lines(path: Path, parse: Callable[[dict[str, Any]], Line]) -> Iterator[Line]:
    """Yield the lines of the ledger of the run in whose directory `path` is; nothing is written.

    Raises:
        UsageError: as for `parsed_lines`, there is no such file, or the configuration of the run is damaged.
        EnvironmentFault: it cannot be read.
    """
    return (found.line for found in parsed_lines(read_bytes(path), path, parse, read_identity(path.parent)))


def damaged(path: Path, line: int, problem: str) -> UsageError:
    """Return what to say of a line that somebody changed; lines count from 1."""
    before = "delete this line and all after it, which are then done again, " if line > 1 else ""
    return UsageError(
        f"{path}, line {line} is damaged ({problem}): restore the file, {before}or start anew with another --output "
        "or --force"
    )
