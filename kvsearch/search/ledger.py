"""All that a search did, on disk, so that one which is interrupted goes on where it stopped.

The ledger is a text file of one JSON object per line: what it is, the seconds of work on the run before it (`at`, the
time between sessions left out), and the fields of its class in `records`:

    {"kind": "asked", "at": 3.25, "stage": "group 1", "generation": 0, "points": [[1.0, 0.75], [0.5, 1.25]]}

Lines are only ever appended, and are on the disk before the search goes on. A last line that was cut short is dropped:
what it held is done again. Any other line that is no such object is refused. Numbers are read again bit for bit.

The state of an optimiser is not kept: it follows from what it was told, which is replayed.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from kvsearch.errors import EnvironmentFault, InternalError
from kvsearch.naming import suggest
from kvsearch.plan.parsing import problems_of
from kvsearch.runs.ledger_files import Unfit, lock, parsed_lines
from kvsearch.search.executors.base import Job, Outcome, Result, keys_of
from kvsearch.search.records import LINES, Asked, Best, Computed, Line, Note, Stage, Told

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OfLine = TypeVar("_OfLine", bound=Line)


class Spent(NamedTuple):
    """What a run has used in all its sessions: different candidates evaluated, tokens, seconds of work."""

    evaluations: int
    tokens: int
    seconds: float


class Ledger:
    """The lines of one run, in memory and in the file `path`, which it holds on to until it is closed.

    `anew` empties the file first.

    Raises:
        UsageError: a line is damaged and not only cut short, or another process writes to the file.
        EnvironmentFault: it cannot be opened.
    """

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        self._path = path
        self._lines: list[Line] = []
        self._evaluated: set[str] = set()
        self._tokens, self._size = 0, 0
        try:
            self._file = path.open("a+b", buffering=0)  # a buffer would be written again after a failure
        except OSError as error:
            raise fault(error, path) from error
        try:
            lock(self._file, path)
            if anew:
                self._file.truncate(0)
            self._read()
        except BaseException:
            self._file.close()
            raise
        self._opened, self._before = time.monotonic(), self._lines[-1].at if self._lines else 0.0

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def append(self, kind: str, **data: Any) -> Line:
        """Write a line of one of the `records.LINES`, arrays as lists; it is on the disk when this returns.

        Raises:
            InternalError: there is no such kind of line, or its fields are other ones.
            EnvironmentFault: the disk is full or the file cannot be written; what was written before is kept.
        """
        try:
            line = _line(kind, {"at": self.spent.seconds, **_plain(data)})
            text = json.dumps({"kind": kind, **line.model_dump()}, allow_nan=False)
        except (Unfit, TypeError, ValueError) as error:
            raise InternalError(f"cannot write a line of kind {kind!r} to {self._path}: {error}") from error
        self._write(text.encode() + b"\n")
        self._note(line)
        return line

    def keep(self, job: Job, outcome: Outcome) -> None:
        """Append what became of a job; errors as for `append`."""
        self.append(
            "result", keys=keys_of(job), outcome=outcome.kind, values=outcome.values, message=outcome.message,
            seconds=outcome.seconds, tokens=outcome.tokens,
        )  # fmt: skip

    @property
    def spent(self) -> Spent:
        """What the run has used until now."""
        seconds = self._before + (time.monotonic() - self._opened)
        return Spent(len(self._evaluated), self._tokens, seconds)

    def results(self, before: Line | None = None) -> dict[str, Result]:
        """What is known of candidates, by `candidate_key`; `before`: only what was written before that line.

        A failure stands once the optimiser was told it. Until then it may be that of a machine since repaired, and is
        left out, so that the candidate is evaluated again.
        """
        found: dict[str, Result] = {}
        failed: dict[str, Result] = {}
        for line in self._lines:
            if line is before:
                break
            if isinstance(line, Told):
                found |= failed
                failed.clear()
            elif isinstance(line, Computed):
                for key, result in line.results.items():
                    failed.pop(key, None)
                    (found if result.kind == "ok" else failed)[key] = result
        return found

    def asked(self, stage: str) -> list[Asked]:
        """What was asked in a stage, in order."""
        return [line for line in self._of(Asked) if line.stage == stage]

    def told(self, stage: str) -> list[Told]:
        """What was told in a stage, in order."""
        return [line for line in self._of(Told) if line.stage == stage]

    def stages(self) -> list[Stage]:
        """Where stages began and ended, in order."""
        return self._of(Stage)

    def notes(self) -> list[Note]:
        """All notes, in order."""
        return self._of(Note)

    @property
    def best(self) -> Best | None:
        """The best candidate that was written last."""
        found = self._of(Best)
        return found[-1] if found else None

    def _of(self, kind: type[_OfLine]) -> list[_OfLine]:
        return [line for line in self._lines if isinstance(line, kind)]

    def _note(self, line: Line) -> None:
        self._lines.append(line)
        if isinstance(line, Computed):
            self._evaluated.update(line.keys)
            self._tokens += line.tokens

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        for size, line in parsed_lines(data, self._path, _of_json):
            self._note(line)
            self._size += size
        if self._size < len(data):
            self._file.truncate(self._size)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
            self._size += len(data)
        except BaseException as error:
            with suppress(OSError):  # else the next session drops the torn line
                self._file.truncate(self._size)
            if isinstance(error, OSError):
                raise fault(error, self._path) from error
            raise


def fault(error: OSError, path: Path) -> EnvironmentFault:
    """One line for a file of a run that cannot be written."""
    what = (error.strerror or str(error)).lower()
    remedy = "free some space" if error.errno in _FULL else "check the disk and the permissions"
    return EnvironmentFault(f"cannot write {path}: {what}; {remedy}, then go on with --resume")


def _line(kind: object, fields: Mapping[str, Any]) -> Line:
    if not isinstance(kind, str) or kind not in LINES:
        raise Unfit(f"there is no kind {kind!r}{suggest(str(kind), list(LINES))}")
    try:
        return LINES[kind].model_validate(fields)
    except ValidationError as error:
        raise Unfit(problems_of(error)[0]) from error


def _of_json(parsed: Any) -> Line:
    if not isinstance(parsed, dict):
        raise Unfit("it is no object")
    return _line(parsed.pop("kind", None), parsed)


def _plain(value: Any) -> Any:
    """A value with arrays and numpy numbers as lists and Python numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
