"""Finished replies on disk, so that a run which is interrupted goes on where it stopped.

The ledger is a text file of one JSON object per line, each with the replies that were finished together:

    {"reused": false, "samples": [{"id": "...", "task": "qasper", "method": "lava@128", ...}]}

Lines are only ever appended, and are on the disk before the next one is begun. A last line that was cut short is
dropped: what it held is computed again. Any other line that is no such object is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.evaluate.journal import Place
from kvsearch.evaluate.samples import Sample
from kvsearch.plan.files import read_bytes

ID = "id"


class Ledger:
    """The finished replies of one run, in memory and in the file `path`, which it holds on to until it is closed.

    `lent` are replies of another run by their key, see `read_replies`; `anew` empties the file first.

    Raises:
        UsageError: a line is damaged and not only cut short, or another process writes to the file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, lent: Mapping[str, Sample] | None = None, *, anew: bool = False) -> None:
        self.lent = lent or {}
        self.samples: dict[Place, Sample] = {}
        self.reused: set[Place] = set()
        self._path, self._lines = path, 0
        self._written: dict[Place, tuple[str, int]] = {}  # the key and the number of the line
        self._file = path.open("a+b", buffering=0)  # a line that cannot be written must not be tried again at the end
        try:
            self._lock(path)
            if anew:
                self._file.truncate(0)
            self._read(path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, samples: Sequence[tuple[str, Sample]], *, reused: bool = False) -> None:
        """Write samples with their keys as one line; they are on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or fails; the replies before are kept.
        """
        line = {"reused": reused, "samples": [{ID: key, **asdict(sample)} for key, sample in samples]}
        try:
            self._write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            what = (error.strerror or str(error)).lower()
            what += ", free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            kept = f"{len(self.samples)} replies are kept"
            raise EnvironmentFault(
                f"cannot write {self._path}: {what}, then give the same command again: {kept}"
            ) from error
        self._note(samples, reused)

    def require(self, keys: Mapping[Place, str]) -> None:
        """UsageError, with the line, if the reply in one of these places was written under another key."""
        for place, key in keys.items():
            written, line = self._written[place]
            if written != key:
                raise _damaged(self._path, line, f"the key of {place.method} on {place.task} is not that of this run")

    def _note(self, samples: Iterable[tuple[str, Sample]], reused: bool) -> None:
        self._lines += 1
        for key, sample in samples:
            place = Place.of(sample)
            self.samples[place], self._written[place] = sample, (key, self._lines)
            if reused:
                self.reused.add(place)

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another kvsearch is writing to {path.parent}: wait for it to end") from None
        except OSError:
            pass  # a file system without locks

    def _read(self, path: Path) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = 0
        for size, line in _lines(data, path):
            self._note([(item[ID], _sample(item)) for item in line["samples"]], line["reused"])
            whole += size
        if whole < len(data):
            self._file.truncate(whole)


def read_replies(path: Path) -> dict[str, Sample]:
    """The samples of a ledger by their keys; errors as for `Ledger`, and UsageError if there is none."""
    found = {}
    for _, line in _lines(read_bytes(path), path):
        for item in line["samples"]:
            found[item[ID]] = _sample(item)
    return found


def _lines(data: bytes, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The complete lines of a ledger with their sizes in bytes; the last one may be broken."""
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                return
            raise _damaged(path, number, "it is no JSON") from None
        problem = _problem(parsed)
        if problem is not None:
            raise _damaged(path, number, problem)
        yield len(line) + 1, parsed


def _damaged(path: Path, line: int, problem: str) -> UsageError:
    return UsageError(
        f"{path}, line {line} is damaged ({problem}): restore the file, or start anew with another --output or --force"
    )


def _problem(line: object) -> str | None:
    """What is wrong with a line, if anything."""
    if not isinstance(line, dict) or set(line) != {"reused", "samples"}:
        return "it is not an object of reused and samples"
    if not isinstance(line["reused"], bool) or not isinstance(line["samples"], list):
        return "reused is true or false, samples is a list"
    for item in line["samples"]:
        if not isinstance(item, dict) or set(item) != set(_FIELDS):
            return "a sample lacks a field or has one too many"
        for name, kind in _FIELDS.items():
            if not _fits(item[name], kind):
                return f"{name} is not a {kind}"
    return None


def _fits(value: object, kind: str) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and type(value) is not bool and abs(value) < float("inf")
    return type(value).__name__ == kind


def _sample(item: Mapping[str, Any]) -> Sample:
    return Sample(**{name: value for name, value in item.items() if name != ID})


_FIELDS: dict[str, str] = {ID: "str", **{field.name: str(field.type) for field in fields(Sample)}}
