"""One process at a time writes to the directory of a run.

What a process has the lock of is known to its context (`contextvars`): a job locks its directory before it reads
anything there, and what it calls may ask for the same lock again, or find out whether it has it.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvsearch.errors import EnvironmentFault, InternalError, KvsearchWarning, UsageError
from kvsearch.plan.files import write_fault
from kvsearch.plan.temporary import TEMPORARY
from kvsearch.runs.holder import LEASE, Busy, is_live, read_holder, renewing, seconds_ago, sign, take

LOCK = f"{TEMPORARY}lock"
_TRIES, _PAUSE = 3, 0.02  # a process that only looks whether somebody writes has the lock for a moment


@dataclass(frozen=True)
class Lock:
    """The lock of a directory, which this process has."""

    directory: Path  # without links
    file: IO[bytes]

    @property
    def stands(self) -> bool:
        """Whether the directory, and this lock in it, are still where they were."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), (self.directory / LOCK).stat())
        except OSError:
            return False

    def require(self) -> None:
        """Raise EnvironmentFault if the directory is gone."""
        if not self.stands:
            raise EnvironmentFault(
                f"{self.directory} was removed or replaced while this command was writing there: what it did is lost, "
                "give the same command again to begin anew"
            )


_HELD: ContextVar[tuple[Lock, ...]] = ContextVar("locks that this process has", default=())


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to `directory`, which is made if need be.

    The lock goes with a process that dies. A directory that was made and stays empty goes again. Who has the lock
    already may ask for it again.

    Raises:
        UsageError: another process is writing there, which the message names, or it is a file.
        EnvironmentFault: the directory cannot be made or written, or was removed meanwhile: told on the way out, in
            place of the error that it led to.
    """
    require_standing(directory)  # else a directory that was removed would be made again
    if any(lock.directory == directory.resolve() for lock in _HELD.get()):
        yield
        return
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = Lock(directory.resolve(), _acquired(directory))
    except FileExistsError:
        raise UsageError(f"{directory} is a file: give a directory to write to") from None
    except OSError as error:
        raise write_fault(error, directory, "give the same command again") from error
    token = _HELD.set((*_HELD.get(), lock))
    try:
        with renewing(lock.file):
            yield
        lock.require()
    except Exception:
        lock.require()
        raise
    finally:
        _HELD.reset(token)
        _release(lock, missing)


def refuse_locked(directory: Path) -> None:
    """Raise the UsageError of `locked` if another process is writing to `directory`; nothing is written."""
    if any(lock.directory == directory.resolve() for lock in _HELD.get()):
        return
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), (directory / LOCK).open("rb") as file:
        try:
            if is_live(file, take(file, fcntl.LOCK_SH)):
                raise Busy
        except Busy:
            raise _refusal(directory, file) from None
        except OSError as error:
            raise EnvironmentFault(f"cannot tell whether somebody is writing to {directory}: {error}") from error


def require_standing(directory: Path) -> None:
    """Raise EnvironmentFault if `directory`, or one above it, is locked by this process and gone."""
    place = directory.resolve()
    for lock in _HELD.get():
        if lock.directory == place or lock.directory in place.parents:
            lock.require()


def require_lock(directory: Path) -> None:
    """Find out, before something is written, whether this process has the lock of `directory` or of one above it.

    Raises:
        InternalError: it has not.
        EnvironmentFault: the directory was removed since.
    """
    place = directory.resolve()
    if not any(lock.directory == place or lock.directory in place.parents for lock in _HELD.get()):
        raise InternalError(f"{directory} is written without its lock")
    require_standing(directory)


def _acquired(directory: Path) -> IO[bytes]:
    """Return the lock file, locked and with this process in it."""
    for attempt in range(1, _TRIES + 1):
        while True:
            file, is_new = _opened(directory / LOCK)
            try:
                has_lock = take(file, fcntl.LOCK_EX)
                if not _is_there(file, directory / LOCK):  # whoever had it has just removed it
                    file.close()
                    continue
                if not is_new and is_live(file, has_lock):
                    raise Busy
                if not is_new and (not has_lock or read_holder(file).is_elsewhere):
                    # only who makes the file has it: a holder that was taken for dead finds it gone
                    (directory / LOCK).unlink(missing_ok=True)
                    file.close()
                    continue
                if not has_lock and not _HELD.get():
                    _warn(directory)
                sign(file)
                return file
            except Busy:
                refusal = _refusal(directory, file)
                file.close()
                break
            except BaseException:
                file.close()
                raise
        if attempt < _TRIES:
            time.sleep(_PAUSE)
    raise refusal


def _opened(path: Path) -> tuple[IO[bytes], bool]:
    """Return the lock file, open, and whether it was made."""
    while True:
        with suppress(FileExistsError):
            return path.open("x+b", buffering=0), True
        with suppress(FileNotFoundError):
            return path.open("r+b", buffering=0), False


def _is_there(file: IO[bytes], path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _release(lock: Lock, missing: list[Path]) -> None:
    """Remove the lock file, unless it is of another process by now, and directories that were made and are empty."""
    with lock.file, suppress(OSError):
        if lock.stands:
            (lock.directory / LOCK).unlink()
            for path in missing:
                path.rmdir()


def _refusal(directory: Path, file: IO[bytes]) -> UsageError:
    holder = read_holder(file)
    when = ""
    if holder.is_elsewhere:
        when = (
            f", seen {seconds_ago(file):.0f} s ago; if that machine has died, its lock ends {LEASE:.0f} s after it was "
            "last seen"
        )
    return UsageError(f"another kvsearch is writing to {directory}{holder.words}: wait for it to end{when}")


def _warn(directory: Path) -> None:
    warnings.warn(
        f"{directory} is on a file system without locks: another kvsearch is kept out only by the file {LOCK}, which "
        f"counts for {LEASE:.0f} s after a process has died",
        KvsearchWarning,
        stacklevel=2,
    )
