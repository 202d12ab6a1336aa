"""What a killed writer left goes with the next write of the same target; what another one writes stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kvsearch.core.files import atomic_write, temporary_for


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    child = os.fork()
    if child == 0:
        with temporary_for(target) as (_, file):
            file.write(b"half")
            file.flush()
            time.sleep(60)
    while not list(tmp_path.glob(".kvsearch-*.tmp")):
        time.sleep(0.01)
    (left,) = tmp_path.glob(".kvsearch-*.tmp")
    while left.read_bytes() != b"half":  # by then it has its lock
        time.sleep(0.01)
    atomic_write(target, b"mine")
    assert left.exists()  # its writer lives
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    atomic_write(tmp_path / "other.json", b"another target")
    assert left.exists()
    atomic_write(target, b"mine again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "plan.json"]


def test_a_file_that_is_taken_for_abandoned_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removes it between its making and its lock."""
    made = list[Path]()
    opened = Path.open

    def remove_first(path: Path, mode: str = "r") -> object:
        file = opened(path, mode)
        made.append(path)
        if len(made) == 1:
            path.unlink()
        return file

    monkeypatch.setattr(Path, "open", remove_first)
    with temporary_for(tmp_path / "plan.json") as (path, file):
        file.write(b"whole")
    assert made == [made[0], path]
    assert path != made[0]
