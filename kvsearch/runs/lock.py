"""One process at a time writes to the directory of a run."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvsearch.errors import UsageError
from kvsearch.plan.files import TEMPORARY, write_fault

LOCK = f"{TEMPORARY}lock"
_TRIES, _PAUSE = 3, 0.02  # a process that only looks whether somebody writes has the lock for a moment
_LONGEST_COMMAND = 160


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to `directory`, which is made if need be.

    The system forgets the lock of a process that dies. A directory that was made and stays empty goes again.

    Raises:
        UsageError: another process is writing there, which the message names, or it is a file.
        EnvironmentFault: the directory cannot be made or written.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = _acquired(directory)
    except FileExistsError:
        raise UsageError(f"{directory} is a file: give a directory to write to") from None
    except OSError as error:
        raise write_fault(error, directory, "give the same command again") from error
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                (directory / LOCK).unlink()
                for path in missing:
                    path.rmdir()


def refuse_locked(directory: Path) -> None:
    """Raise the UsageError of `locked` if another process is writing to `directory`; nothing is written."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), (directory / LOCK).open("rb") as file:
        _take(file, directory, fcntl.LOCK_SH)


def this_command() -> list[str]:
    """Return the command line of this process, which may be a script that calls kvsearch."""
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
    return ["kvsearch" if name in ("kvsearch", "__main__") else name, *sys.argv[1:]]


def _acquired(directory: Path) -> IO[bytes]:
    """Return the lock file, locked and with this process in it."""
    path = directory / LOCK
    while True:
        file = path.open("a+b", buffering=0)
        try:
            _take(file, directory, fcntl.LOCK_EX, _TRIES)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    _sign(file)
                    return file
            file.close()  # whoever had it has just removed it
        except BaseException:
            file.close()
            raise


def _take(file: IO[bytes], directory: Path, kind: int, tries: int = 1) -> None:
    for attempt in range(1, tries + 1):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == tries:
                raise UsageError(
                    f"another kvsearch is writing to {directory}{_holder(file)}: wait for it to end"
                ) from None
            time.sleep(_PAUSE)
        except OSError:
            return  # a file system without locks
        else:
            return


def _sign(file: IO[bytes]) -> None:
    """Say who has the lock; where there is no room for it, the lock holds all the same."""
    holder = {"process": os.getpid(), "host": socket.gethostname(), "command": this_command()}
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(holder).encode())


def _holder(file: IO[bytes]) -> str:
    """Return who has the lock, in brackets; empty if the file does not say."""
    try:
        file.seek(0)
        found = json.loads(file.read())
        command = " ".join(shlex.join(found["command"]).split())
        short = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."
        return f" (process {found['process']} on {found['host']}: {short})"
    except (OSError, ValueError, TypeError, KeyError):
        return ""
