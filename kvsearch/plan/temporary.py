"""The file that takes the place of another one once it is whole, and what is left of it where its writer was killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".kvsearch-"  # begins the name of a file that is there only while a process works
SUFFIX = ".tmp"
_HERE, _NOT_REPLACING = -100, 1  # of Linux: AT_FDCWD, RENAME_NOREPLACE


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


def rename_new(source: Path, target: Path) -> bool:
    """Rename a file in one step; False, and nothing is done, where there is a file of that name already.

    Where the system or the file system has no such step (not Linux; NFS), another process that makes the file in the
    moment between is not seen.

    Raises:
        OSError: it cannot be renamed.
    """
    rename: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if not rename(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _NOT_REPLACING):
            return True
        if ctypes.get_errno() == errno.EEXIST:
            return False
    if target.exists():
        return False
    source.replace(target)  # which tells what else is wrong
    return True


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
