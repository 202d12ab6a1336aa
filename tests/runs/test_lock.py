"""One process at a time writes to a directory, and who is refused hears who writes there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from kvsearch.errors import EnvironmentFault, InternalError, KvsearchWarning, UsageError
from kvsearch.runs.directory import is_unused
from kvsearch.runs.holder import LEASE, boot
from kvsearch.runs.lock import LOCK, locked, refuse_locked, require_lock
from tests.runs.locks import locked_elsewhere

REMOVED = "was removed or replaced while this command was writing there: what it did is lost, give the same command"
HOLDER = """
import sys, time
from pathlib import Path
from kvsearch.runs.lock import locked
sys.argv = ["kvsearch", "calibrate", "a model", "-o", "run"]
with locked(Path(sys.orig_argv[-1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to a directory until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
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
            with pytest.raises(UsageError) as found, locked(directory):
                pass
            with pytest.raises(UsageError) as looked:
                refuse_locked(directory)
            assert str(looked.value) == str(found.value)
        assert str(found.value) == (
            f"another kvsearch is writing to {directory} (process {process.pid} on {socket.gethostname()}: "
            "kvsearch calibrate 'a model' -o run): wait for it to end"
        )


def test_the_lock_of_a_dead_process_is_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()
    assert is_unused(tmp_path)
    refuse_locked(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_another_context_of_the_process_is_refused(tmp_path: Path) -> None:
    with locked_elsewhere(tmp_path):
        with pytest.raises(UsageError, match="another kvsearch is writing to"), locked(tmp_path):
            pass
        with pytest.raises(UsageError, match="another kvsearch is writing to"):
            refuse_locked(tmp_path)
    with locked(tmp_path):
        pass


def test_who_has_it_may_ask_again(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with locked(tmp_path):
        for same in (tmp_path, tmp_path / "link"):
            with locked(same):
                refuse_locked(same)
                require_lock(same / "deep" / "below")
    with pytest.raises(InternalError, match="is written without its lock"):
        require_lock(tmp_path)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "a" / "b"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "mine").touch()
    assert [item.name for item in (tmp_path / "a").iterdir()] == ["mine"]
    refuse_locked(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        pass
    assert (tmp_path / "run").is_dir()


def test_only_one_of_many_has_it(tmp_path: Path) -> None:
    """Holders that come and go, so that the file is removed between looking and locking."""
    inside, most, entered = [0], [0], [0]

    def work() -> None:
        for _ in range(200):
            try:
                with locked(tmp_path):
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


# --- file systems without locks, and other machines -------------------------------------------------------------------


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)


def held_by(directory: Path, seconds_ago: float, **changes: object) -> Path:
    """Leave the lock of a process of another machine, which renewed it so long ago."""
    holder = {"process": 7, "host": "node-a", "boot": "other", "command": ["kvsearch", "run"], **changes}
    (directory / LOCK).write_text(json.dumps(holder))
    then = time.time() - seconds_ago
    os.utime(directory / LOCK, (then, then))
    return directory


@pytest.mark.usefixtures("without_flock")
def test_without_locks_of_the_system_the_file_keeps_others_out(tmp_path: Path) -> None:
    words = "is on a file system without locks: another kvsearch is kept out only by"
    with pytest.warns(KvsearchWarning, match=words) as told, locked(tmp_path):
        with pytest.raises(UsageError, match="another kvsearch is writing to") as found, locked_elsewhere(tmp_path):
            pass
        assert f"(process {os.getpid()} on " in str(found.value)
        with locked(tmp_path / "deep"):
            pass
    assert len(told) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_flock")
@pytest.mark.filterwarnings("ignore::kvsearch.errors.KvsearchWarning")
@pytest.mark.parametrize("dead", ["of this machine", "silent"])
def test_without_locks_of_the_system_a_dead_process_is_told_from_a_live_one(tmp_path: Path, dead: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    if dead == "silent":
        held_by(tmp_path, LEASE + 1)
    else:
        held_by(tmp_path, 0, process=gone.pid, host=socket.gethostname(), boot=boot())
    refuse_locked(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attempt", [locked, refuse_locked])
def test_another_machine_that_was_seen_lately_is_refused(
    tmp_path: Path, attempt: Callable[[Path], AbstractContextManager[None] | None]
) -> None:
    """Where locks are of one machine alone: this one has given its lock."""
    held_by(tmp_path, 20)
    words = r"\(process 7 on node-a: kvsearch run\): wait for it to end, seen 2\d s ago; if that machine has died, its "
    with pytest.raises(UsageError, match=words), attempt(tmp_path) or nullcontext():
        pass
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node-a"


@pytest.mark.parametrize(
    ("ago", "changes"), [(LEASE + 1, {}), (1, {"boot": boot()}), (1, {"host": socket.gethostname()})],
    ids=["not seen for long", "a container of this machine", "this machine, started anew"],
)  # fmt: skip
def test_another_machine_that_has_died_is_not(tmp_path: Path, ago: float, changes: dict[str, object]) -> None:
    held_by(tmp_path, ago, **changes)
    refuse_locked(tmp_path)
    with locked(tmp_path):
        pass


def test_who_was_taken_for_dead_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept for longer than its lock is renewed, where locks are of one machine alone."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(EnvironmentFault, match=REMOVED), locked(tmp_path):
        held_by(tmp_path, LEASE + 1)
        with locked_elsewhere(tmp_path):
            with pytest.raises(EnvironmentFault, match=REMOVED):
                require_lock(tmp_path / "run")
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.runs.holder.BEAT", 0.001)
    with locked(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        while (tmp_path / LOCK).stat().st_mtime == 0:
            time.sleep(0.001)
    assert "kvsearch lock" not in {one.name for one in threading.enumerate()}


def test_a_file_system_that_fails_is_no_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with locked_elsewhere(tmp_path), monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", broken)
        with pytest.raises(EnvironmentFault, match="cannot tell whether somebody is writing to"):
            refuse_locked(tmp_path)
        with pytest.raises(EnvironmentFault, match=r"cannot write .*: input/output error"), locked(tmp_path):
            pass


# --- a directory that is removed under its lock -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
@pytest.mark.parametrize("error", [None, UsageError("its folder does not exist"), FileNotFoundError("it")])
def test_a_directory_that_goes_is_told(tmp_path: Path, how: str, error: Exception | None) -> None:
    with pytest.raises(EnvironmentFault, match=REMOVED), locked(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        if how == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        if how == "replaced":
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / LOCK).write_text("of another process")
        if error is not None:
            raise error
    assert (tmp_path / "run").exists() == (how == "replaced")
    assert how != "replaced" or (tmp_path / "run" / LOCK).read_text() == "of another process"


def test_a_directory_that_goes_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=REMOVED), locked(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        for again in (lambda: require_lock(tmp_path / "run"), locked(tmp_path / "run" / "stage").__enter__):
            with pytest.raises(EnvironmentFault, match=REMOVED):
                again()
    assert not (tmp_path / "run").exists()


def test_interruptions_stay_interruptions(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        raise KeyboardInterrupt


# --- who says nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "3", '{"process": 1}'])
def test_a_holder_that_says_nothing(tmp_path: Path, content: str) -> None:
    with locked_elsewhere(tmp_path):
        (tmp_path / LOCK).write_text(content)
        with pytest.raises(UsageError, match=f"^another kvsearch is writing to {re.escape(str(tmp_path))}: wait for"):
            refuse_locked(tmp_path)


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refuse_locked(tmp_path / "file")
    with pytest.raises(UsageError, match="file is a file: give a directory to write to"), locked(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"
    refuse_locked(tmp_path / "file" / "run")
    with (
        pytest.raises(EnvironmentFault, match=r"^cannot write .*run: not a directory, check the disk"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
