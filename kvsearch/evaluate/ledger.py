"""Finished replies on disk, so that a run which is interrupted goes on where it stopped.

The ledger is a text file of one JSON object per line, each with the replies that were finished together:

    {"reused": false, "samples": [{"id": "...", "task": "qasper", "method": "lava@128", ...}]}

Lines are only ever appended, and are on the disk before the next one is begun. A last line that was cut short is
dropped: what it held is computed again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsearch.errors import UsageError
from kvsearch.evaluate.journal import Place
from kvsearch.evaluate.samples import Sample
from kvsearch.plan.files import read_bytes

ID = "id"


class Ledger:
    """The finished replies of one run, in memory and in the file `path`, which it holds on to until it is closed.

    `lent` are replies of another run by their key, see `read_replies`; `anew` empties the file first.

    Raises:
        UsageError: the file is damaged before its last line, or another process writes to it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, lent: Mapping[str, Sample] | None = None, *, anew: bool = False) -> None:
        self.lent = lent or {}
        self.samples: dict[Place, Sample] = {}
        self.reused: set[Place] = set()
        self._file = path.open("a+b")
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
        """Write samples with their keys as one line; they are on the disk when this returns."""
        line = {"reused": reused, "samples": [{ID: key, **asdict(sample)} for key, sample in samples]}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._note((sample for _, sample in samples), reused)

    def _note(self, samples: Iterable[Sample], reused: bool) -> None:
        for sample in samples:
            self.samples[Place.of(sample)] = sample
            if reused:
                self.reused.add(Place.of(sample))

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
            self._note((_sample(item) for item in line["samples"]), line["reused"])
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
        parsed = _parsed(line)
        if parsed is not None:
            yield len(line) + 1, parsed
        elif number < len(lines) - 1:
            raise UsageError(
                f"{path}, line {number} is damaged: restore the file, or start anew with another --output or --force"
            )


def _parsed(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        if all(set(item) == _NAMES for item in found["samples"]) and isinstance(found["reused"], bool):
            return dict(found)
    return None


def _sample(item: Mapping[str, Any]) -> Sample:
    return Sample(**{name: value for name, value in item.items() if name != ID})


_NAMES: set[str] = {ID, *(field.name for field in fields(Sample))}
