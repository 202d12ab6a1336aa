"""What a killed writer left goes with the next write of the same target; what another one writes stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvsearch.core.files import atomic_write, temporary_for

WRITER = """
import sys, time
from pathlib import Path
from kvsearch.core.files import temporary_for
with temporary_for(Path(sys.argv[1])) as (_, file):
    file.write(b"half")
    file.flush()
    print("begun", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    with subprocess.Popen([sys.executable, "-c", WRITER, target], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        (left,) = tmp_path.glob(".kvsearch-*.tmp")
        atomic_write(target, b"mine")
        assert left.exists()  # its writer lives
        writer.kill()
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
