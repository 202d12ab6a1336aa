"""Who has the lock of a directory: what its file says, for how long it was renewed, and whether that is a live process.

Two locks are put on the file, as no file system promises both. The system's own (`flock`) goes with its process, but
some shared file systems do not have it, or keep it to one machine. The file itself is renewed every `BEAT` seconds,
which other machines see; what was not renewed for `LEASE` seconds is of a process that has died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

BEAT, LEASE = 10.0, 60.0  # seconds
LONGEST_TOLD, MOST_BYTES = 160, 1 << 20  # letters of a command, bytes of a lock
MOST_PROCESS = 2**31 - 1  # a number above is none of a process
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux: containers of one machine have the same


class Busy(Exception):
    """A live process has the lock."""


class Holder(NamedTuple):
    """A process that has put its name into a lock; None of what the file does not say."""

    process: int | None = None
    host: str | None = None
    boot: str | None = None
    command: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Who it is, in brackets after a space; nothing if it does not say."""
        if self.process is None:
            return ""
        return f" (process {self.process} on {_short(str(self.host))}: {_short(shlex.join(self.command))})"

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is of another machine, whose locks this one may not see; one that was started anew is none."""
        return self.host not in (None, socket.gethostname()) and (self.boot is None or self.boot != boot())

    @property
    def has_died(self) -> bool:
        """Whether it was a process of this machine that is no more; False where that cannot be told."""
        if self.process is None or (self.host, self.boot) != (socket.gethostname(), boot()):
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def this_command() -> list[str]:
    """Return the command line of this process, which may be a script that calls kvsearch."""
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
    return ["kvsearch" if name in ("kvsearch", "__main__") else name, *sys.argv[1:]]


def _short(text: str) -> str:
    told = " ".join(text.split())
    return told if len(told) <= LONGEST_TOLD else f"{told[:LONGEST_TOLD]}..."


@cache
def boot() -> str | None:
    """Return what names this machine since it was started; None where the system does not say."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None


def sign(file: IO[bytes]) -> None:
    """Say who has the lock; where there is no room for it, the lock holds all the same."""
    holder = {
        "process": os.getpid(), "host": socket.gethostname(), "boot": boot(), "command": this_command(),
    }  # fmt: skip
    with suppress(OSError):
        file.truncate(0)
        file.seek(0)
        file.write(json.dumps(holder).encode())


def read_holder(file: IO[bytes]) -> Holder:
    """Return who has put its name into a lock file."""
    try:
        file.seek(0)
        found = json.loads(file.read(MOST_BYTES))
        process = int(found["process"])
        if not 0 < process <= MOST_PROCESS:
            return Holder()
        return Holder(process, str(found["host"]), found.get("boot"), tuple(map(str, found["command"])))
    except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
        return Holder()


def take(file: IO[bytes], kind: int) -> bool:
    """Take the system's lock on a file; False: the file system has none.

    Raises:
        Busy: another process has it.
        OSError: the file system failed.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def seconds_ago(file: IO[bytes]) -> float:
    """Return the age of a lock since it was renewed; of one from the future, as clocks differ, 0."""
    return max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)


def is_live(file: IO[bytes], has_lock: bool) -> bool:
    """Tell whether a live process may have a lock file, though the system gave its lock or has none (`has_lock`)."""
    holder = read_holder(file)
    if holder.has_died or (has_lock and not holder.is_elsewhere):
        return False
    return seconds_ago(file) < LEASE


@contextmanager
def renewing(file: IO[bytes]) -> Iterator[None]:
    """Renew a lock file while this lasts."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(BEAT):
            with suppress(OSError):  # what is wrong there is told when something is written
                os.utime(file.fileno())

    thread = threading.Thread(target=renew, name="kvsearch lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
