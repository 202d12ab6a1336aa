"""One process at a time writes to the directory of a run.

The lock is the system's own (`flock`) on a file that says who has it, so it goes with a process that dies. What a
process has the lock of is known to its context (`contextvars`): a job locks its directory before it reads anything
there, and what it calls may ask for the same lock again, or find out whether it has it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import IO

from kvsearch.core.errors import InternalError, KvsearchWarning, UsageError
from kvsearch.core.files import TEMPORARY, resolve_path, write_fault

LOCK = f"{TEMPORARY}lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)  # of a file system
_TRIES = 3  # a process that only looks whether somebody writes has the lock for a moment
_PAUSE = 0.02
_OWNER_LETTERS = 300  # that are shown of a lock's owner

_HELD: ContextVar[tuple[Path, ...]] = ContextVar("directories, without links, that this process has locked", default=())


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock `directory` against other processes that write; the directory is made if it is missing.

    A directory that was made and stays empty goes again. Who has the lock already may ask for it again.

    Raises:
        UsageError: another process is writing there, which the message names, or it is a file or in one.
        EnvironmentFault: the directory cannot be made or written.
    """
    if resolve_path(directory) in _HELD.get():
        yield
        return
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = _acquire(directory)
    except (FileExistsError, NotADirectoryError):
        place = next(path for path in (directory, *directory.parents) if path.exists())
        raise UsageError(f"{place} is a file: give a directory to write to") from None
    except OSError as error:
        raise write_fault(error, directory, "give the same command again") from error
    token = _HELD.set((*_HELD.get(), resolve_path(directory)))
    try:
        yield
    finally:
        _HELD.reset(token)
        with file, suppress(OSError):
            if _is_at(file, directory / LOCK):
                (directory / LOCK).unlink()
                for path in missing:
                    path.rmdir()


def refuse_locked(directory: Path) -> None:
    """Raise the UsageError of `lock_directory` if another process is writing to `directory`; nothing is written."""
    if resolve_path(directory) in _HELD.get():
        return
    with suppress(OSError), (directory / LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked_error(directory, file) from None


def require_lock(directory: Path) -> None:
    """Raise InternalError unless this process has the lock of `directory` or of one above it."""
    place = resolve_path(directory)
    if not any(held == place or held in place.parents for held in _HELD.get()):
        raise InternalError(f"{directory} is written without its lock")


def find_own_command() -> list[str]:
    """Return the command line of this process, which may be a script that calls kvsearch."""
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
    return ["kvsearch" if name in ("kvsearch", "__main__") else name, *sys.argv[1:]]


def _acquire(directory: Path) -> IO[bytes]:
    """Return the lock file, locked and with this process in it."""
    tries = _TRIES
    while True:
        file = (directory / LOCK).open("a+b", buffering=0)
        if not _try_lock(file, directory):
            tries -= 1
            with file:
                if not tries:
                    raise _locked_error(directory, file)
            time.sleep(_PAUSE)
        elif _is_at(file, directory / LOCK):
            _write_owner(file)
            return file
        else:  # its owner removed it in between
            file.close()


def _try_lock(file: IO[bytes], directory: Path) -> bool:
    """Return False if another process has the lock; a file system without locks gives it to all, with a warning."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        where = f"{directory} is on a file system without locks"
        warnings.warn(f"{where}: nothing keeps another kvsearch from writing there", KvsearchWarning, stacklevel=2)
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return True if an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _write_owner(file: IO[bytes]) -> None:
    """Write this process into its lock file; on a full disk the lock holds all the same."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"host": socket.gethostname(), "process": os.getpid(), "command": find_own_command(), "since": since}
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(owner).encode())


def _locked_error(directory: Path, file: IO[bytes]) -> UsageError:
    """Make the error about a directory that another process has locked, with the owner if the file names it."""
    try:
        file.seek(0)
        owner = json.loads(file.read())
        text = f" (process {owner['process']} on {owner['host']} since {owner['since']}: {shlex.join(owner['command'])}"
        described = f" {' '.join(text.split())[:_OWNER_LETTERS]})"
    except (OSError, ValueError, TypeError, KeyError):
        described = ""
    return UsageError(f"another kvsearch is writing to {directory}{described}: wait for it to end")
