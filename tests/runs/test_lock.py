"""One process at a time writes to a directory, and who is refused hears who writes there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvsearch.core.errors import InternalError, KvsearchWarning, UsageError
from kvsearch.runs.lock import LOCK, lock_directory, refuse_locked, require_lock
from kvsearch.runs.run import is_unused
from tests.runs.guard import locked_elsewhere

HOLDER = """
import sys, time
from pathlib import Path
from kvsearch.runs.lock import lock_directory
sys.argv = ["kvsearch", "calibrate", "a model", "-o", "run"]
with lock_directory(Path(sys.orig_argv[-1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to a directory until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_the_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with holder(directory) as process:
        for _ in range(2):
            with pytest.raises(UsageError) as found, lock_directory(directory):
                pass
            with pytest.raises(UsageError) as looked:
                refuse_locked(directory)
            assert str(looked.value) == str(found.value)
        owner = json.loads((directory / LOCK).read_text())
        assert str(found.value) == (
            f"another kvsearch is writing to {directory} (process {process.pid} on {socket.gethostname()} since "
            f"{owner['since']}: kvsearch calibrate 'a model' -o run): wait for it to end"
        )


def test_the_lock_of_a_dead_process_is_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()
    assert is_unused(tmp_path)
    refuse_locked(tmp_path)
    with lock_directory(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_who_has_it_may_ask_again(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with lock_directory(tmp_path):
        for same in (tmp_path, tmp_path / "link"):
            with lock_directory(same):
                refuse_locked(same)
                require_lock(same / "deep" / "below")
    with pytest.raises(InternalError, match="is written without its lock"):
        require_lock(tmp_path)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), lock_directory(tmp_path / "a" / "b"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with lock_directory(tmp_path / "a" / "b"):
        (tmp_path / "a" / "mine").touch()
    assert [item.name for item in (tmp_path / "a").iterdir()] == ["mine"]
    refuse_locked(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_only_one_of_many_has_it(tmp_path: Path) -> None:
    """Holders that come and go, so that the file is removed between looking and locking."""
    inside, most, entered = [0], [0], [0]

    def work() -> None:
        for _ in range(200):
            try:
                with lock_directory(tmp_path):
                    inside[0] += 1
                    most[0], entered[0] = max(most[0], inside[0]), entered[0] + 1
                    inside[0] -= 1
            except UsageError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert entered[0] > 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    with (
        pytest.warns(KvsearchWarning, match="is on a file system without locks: nothing keeps"),
        lock_directory(tmp_path),
    ):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
        refuse_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_says_nothing(tmp_path: Path) -> None:
    words = f"^another kvsearch is writing to {re.escape(str(tmp_path))}: wait for"
    with locked_elsewhere(tmp_path):
        for content in ("", "{", "3", '{"process": 1}'):
            (tmp_path / LOCK).write_text(content)
            with pytest.raises(UsageError, match=words):
                refuse_locked(tmp_path)


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refuse_locked(tmp_path / "file")
    with (
        pytest.raises(UsageError, match="file is a file: give a directory to write to"),
        lock_directory(tmp_path / "file"),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"
    refuse_locked(tmp_path / "file" / "run")
    with pytest.raises(UsageError, match="file is a file: give a directory"), lock_directory(tmp_path / "file" / "run"):
        pass
