"""Ledgers: files of one JSON object per line, to which lines are only appended, by one process at a time."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from kvsearch.errors import UsageError

_Line = TypeVar("_Line")


class Unfit(Exception):
    """A line that is none of its file; the message says why."""


def lock(file: IO[bytes], path: Path) -> None:
    """Keep other processes from writing to an open file, until it is closed; UsageError if one of them does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another kvsearch is writing to {path.parent}: wait for it to end") from None
    except OSError:
        pass  # a file system without locks


def parsed_lines(data: bytes, path: Path, parse: Callable[[Any], _Line]) -> Iterator[tuple[int, _Line]]:
    """The complete lines of a ledger as `parse` makes them of their JSON, with their sizes in bytes.

    The last one may be broken, that of a process which was killed: it is left out.

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
    """What to say of a line that somebody changed; lines count from 1."""
    return UsageError(
        f"{path}, line {line} is damaged ({problem}): restore the file, or start anew with another --output or --force"
    )
