"""The file that takes the place of another one once it is whole, and what is left of it where its writer was killed."""

from __future__ import annotations

import fcntl
import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".kvsearch-"  # begins the name of a file that is there only while a process works
SUFFIX = ".tmp"


@contextmanager
def temporary_for(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file next to `target`, and its path; it is removed unless it is renamed before the end.

    Its writer has the system's lock on it, which ends with the process: so what a killed one left of the same target is
    told from what another one is writing now, and removed. A file system without locks keeps it.

    Raises:
        OSError: the file cannot be made.
    """
    beginning = f"{TEMPORARY}{hashlib.sha256(target.name.encode(errors='surrogateescape')).hexdigest()[:8]}-"
    _remove_abandoned(target.parent, beginning)
    path, file = _made(target.parent, beginning)
    try:
        with file:
            yield path, file
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _made(folder: Path, beginning: str) -> tuple[Path, BinaryIO]:
    while True:
        path = folder / f"{beginning}{secrets.token_hex(8)}{SUFFIX}"
        file = path.open("xb")
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, file
        except BaseException:
            file.close()
            raise
        file.close()  # who looked at it before it was locked took it for abandoned


def _remove_abandoned(folder: Path, beginning: str) -> None:
    for path in folder.iterdir():
        if path.name.startswith(beginning) and path.suffix == SUFFIX:
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
