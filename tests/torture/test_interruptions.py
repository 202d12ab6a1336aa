"""Commands that are killed, or run out of disk, go on to the results of those that were not."""

from __future__ import annotations

import resource
import subprocess
import time
from pathlib import Path

import pytest

from kvsearch.core.files import TEMPORARY
from kvsearch.report.integrity import Verification
from kvsearch.runs.identity import LEDGER, SUMS
from tests.torture.commands import COMMANDS, end, find_differences, finish, start

FULL_DISK = 3  # the exit code of an environment that is at fault


def measure_progress(directory: Path) -> int:
    """Count the files of a run and the lines of its ledgers, which only become more."""
    count = 0
    for path in directory.rglob("*"):
        count += 1
        if path.name == LEDGER:
            count += path.read_bytes().count(b"\n")
    return count


def kill_at(process: subprocess.Popen[str], directory: Path, progress: int) -> bool:
    """Kill a command once its directory has come so far; return False if it ended before."""
    while process.poll() is None:
        if measure_progress(directory) >= progress:
            process.kill()
            process.communicate()
            return True
        time.sleep(0.002)
    return False


@pytest.mark.parametrize("verb", ["run", "evolve"])  # a run calibrates and evaluates, too
def test_a_killed_command_goes_on_to_the_same_results(verb: str, tmp_path: Path) -> None:
    """Killed three times on its way, with the last line of ledgers torn where their stage is not finished."""
    expected = finish(tmp_path / "whole", COMMANDS[verb])
    total, killed = measure_progress(expected), 0
    for part in (0.2, 0.5, 0.8):
        process = start(tmp_path / "killed", COMMANDS[verb])
        killed += kill_at(process, tmp_path / "killed" / "out", int(part * total))
        for ledger in (tmp_path / "killed" / "out").rglob(LEDGER):
            if not (ledger.parent / SUMS).exists():  # a stage that is finished is only read
                with ledger.open("ab") as file:
                    file.write(b'{"kind": "result", "at": 1.')
    assert killed > 0
    found = finish(tmp_path / "killed", COMMANDS[verb])
    assert find_differences(expected, found) == []
    assert Verification([found]).damaged == ()
    assert [path.name for path in found.rglob(f"{TEMPORARY}*")] == []


def test_a_full_disk_is_one_line_and_what_is_finished_stays(tmp_path: Path) -> None:
    """No file may be larger than three quarters of the finished ledger."""
    expected = finish(tmp_path / "whole", COMMANDS["evaluate"])
    size = (expected / LEDGER).stat().st_size * 3 // 4

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    code, talk = end(start(tmp_path / "full", COMMANDS["evaluate"], limit))
    assert code == FULL_DISK, talk
    errors = [line for line in talk.splitlines() if line.startswith("kvsearch: error")]
    assert len(errors) == 1
    assert "Traceback" not in talk
    assert measure_progress(tmp_path / "full" / "out") > 3
    assert find_differences(expected, finish(tmp_path / "full", COMMANDS["evaluate"])) == []
