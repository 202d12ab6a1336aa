"""What a run has done so far: a file of one JSON object per line, to which lines are only ever appended.

A line is on the disk before the run goes on. A last line that was cut short, that of a process which was killed, is
dropped: what it held is done again. The last two fields of a line are its number, from 1, and its checksum:

    {"text": "what the ledger says", "line": 2, "checksum": "9f86d081884c7d65"}

The checksum is the beginning of the SHA-256 of the identity of the run and of the bytes of the line up to the comma
before "checksum". So a line that was changed, dropped, moved or added is found, and a ledger of another run. It is no
signature: whoever can write the file can also compute checksums.
"""

from __future__ import annotations

import hashlib
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
from kvsearch.runs.identity import read_identity

LedgerLine = TypeVar("LedgerLine")
NUMBER_KEY = "line"
CHECKSUM_KEY = "checksum"
CHECKSUM_DIGITS = 16


class LedgerFormatError(Exception):
    """A line that does not belong to its ledger; the message says why."""


class Ledger(Closing, Generic[LedgerLine]):
    """The lines of a run, in the file `path`, which stays open until `close`.

    Of the lines nothing stays in memory but what `_note` takes in, so a run may have any number of them.

    The caller has the lock of the directory, see `kvsearch.runs.lock`. `identity` is that of the run, see `RunConfig`;
    empty for lines that belong to none.

    Raises:
        UsageError: a line is damaged and not only cut short, or it is the ledger of another run.
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(self, path: Path, identity: str = "") -> None:
        self.path = path
        self._identity = identity
        self.count = 0  # of lines
        self._size = 0
        try:
            self._file = path.open("a+b", buffering=0)  # a buffer would be written again after a failure
        except OSError as error:
            raise write_fault(error, path, self.go_on) from error
        try:
            data = path.read_bytes()
            for line, size in parse_lines(data, path, self.parse, identity):
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
        """Parse a ledger line's JSON, without number and checksum; raises `LedgerFormatError` for a bad line."""

    @property
    @abstractmethod
    def go_on(self) -> str:
        """How to go on after the disk was full, for people."""

    def _append(self, line: LedgerLine, text: str) -> None:
        """Write a line as `text`, a JSON object; it is on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or the file cannot be written; what was written before is kept.
        """
        data = with_checksum(text, self.count + 1, self._identity) + b"\n"
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


def with_checksum(text: str, number: int, identity: str = "") -> bytes:
    """Format a line of a ledger: the fields of `text`, a JSON object, then its number and checksum."""
    comma = "" if text == "{}" else ", "
    body = f'{text[:-1]}{comma}"{NUMBER_KEY}": {number}'.encode()
    return body + _format_end(body, identity)


def _format_end(body: bytes, identity: str) -> bytes:
    checksum = hashlib.sha256(identity.encode() + body).hexdigest()[:CHECKSUM_DIGITS]
    return f', "{CHECKSUM_KEY}": "{checksum}"}}'.encode()


def _check_seal(line: bytes, content: Any, number: int, identity: str) -> None:
    """Raise LedgerFormatError if a line, whose JSON is `content`, is not the one that was written with this number."""
    if not isinstance(content, dict) or not {NUMBER_KEY, CHECKSUM_KEY} <= content.keys():
        raise LedgerFormatError("it has no number and checksum")
    if content[NUMBER_KEY] != number or type(content[NUMBER_KEY]) is not int:
        raise LedgerFormatError(f"it does not say that it is line {number}: one was removed, added or moved")
    body, _, _ = line.rpartition(f', "{CHECKSUM_KEY}": '.encode())
    if line != body + _format_end(body, identity):
        raise LedgerFormatError("its checksum does not fit: it was changed, or is that of another run")


def parse_lines(
    data: bytes, path: Path, parse: Callable[[dict[str, Any]], LedgerLine], identity: str = ""
) -> Iterator[tuple[LedgerLine, int]]:
    """Yield the complete lines of a ledger as `parse` makes them of their JSON, and their sizes in bytes.

    The last one may be broken: it is left out.

    Raises:
        UsageError: any other line is no JSON, was changed or moved, or `parse` raises `LedgerFormatError` for it.
    """
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                return
            raise damaged_line_error(path, number, "it is no JSON") from None
        try:
            _check_seal(line, content, number, identity)
            parsed = parse({key: value for key, value in content.items() if key not in (NUMBER_KEY, CHECKSUM_KEY)})
        except LedgerFormatError as problem:
            raise damaged_line_error(path, number, str(problem)) from None
        yield parsed, len(line) + 1


def read_lines(path: Path, parse: Callable[[dict[str, Any]], LedgerLine]) -> Iterator[LedgerLine]:
    """Yield the lines of the ledger of the run in whose directory `path` is; nothing is written.

    Raises:
        UsageError: as for `parse_lines`, there is no such file, or the configuration of the run is damaged.
        EnvironmentFault: it cannot be read.
    """
    return (line for line, _ in parse_lines(read_bytes(path), path, parse, read_identity(path.parent)))


def damaged_line_error(path: Path, line: int, problem: str) -> UsageError:
    """Make the error about a line that was changed; lines count from 1."""
    before = "delete this line and all after it, which are then done again, " if line > 1 else ""
    return UsageError(
        f"{path}, line {line} is damaged ({problem}): restore the file, {before}or start anew with another --output "
        "or --force"
    )
