"""Finished replies on disk, so that a run which is interrupted goes on where it stopped.

The ledger is a text file of one JSON object per line, each with the replies that were finished together:

    {"reused": false, "samples": [{"id": "...", "task": "qasper", "method": "lava@128", ...}]}

Lines are only ever appended, and are on the disk before the next one is begun. A last line that was cut short is
dropped: what it held is computed again. Any other line that is no such object is refused.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsearch.errors import EnvironmentFault
from kvsearch.evaluation.reply_places import Place
from kvsearch.evaluation.samples import Sample
from kvsearch.plan.files import read_bytes
from kvsearch.runs.ledger_files import Unfit, damaged, lock, parsed_lines

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
            lock(self._file, path)
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
                raise damaged(self._path, line, f"the key of {place.method} on {place.task} is not that of this run")

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

    def _read(self, path: Path) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = 0
        for size, line in parsed_lines(data, path, _checked):
            self._note([(item[ID], _sample(item)) for item in line["samples"]], line["reused"])
            whole += size
        if whole < len(data):
            self._file.truncate(whole)


def read_replies(path: Path) -> dict[str, Sample]:
    """The samples of a ledger by their keys; errors as for `Ledger`, and UsageError if there is none."""
    found = {}
    for _, line in parsed_lines(read_bytes(path), path, _checked):
        for item in line["samples"]:
            found[item[ID]] = _sample(item)
    return found


def _checked(line: Any) -> dict[str, Any]:
    """What a line of a ledger holds; Unfit if it is none."""
    if not isinstance(line, dict) or set(line) != {"reused", "samples"}:
        raise Unfit("it is not an object of reused and samples")
    if not isinstance(line["reused"], bool) or not isinstance(line["samples"], list):
        raise Unfit("reused is true or false, samples is a list")
    for item in line["samples"]:
        if not isinstance(item, dict) or set(item) != set(_FIELDS):
            raise Unfit("a sample lacks a field or has one too many")
        for name, kind in _FIELDS.items():
            if not _fits(item[name], kind):
                raise Unfit(f"{name} is not a {kind}")
    return line


def _fits(value: object, kind: str) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and type(value) is not bool and abs(value) < float("inf")
    return type(value).__name__ == kind


def _sample(item: Mapping[str, Any]) -> Sample:
    return Sample(**{name: value for name, value in item.items() if name != ID})


_FIELDS: dict[str, str] = {ID: "str", **{field.name: str(field.type) for field in fields(Sample)}}
