"""One rule for all jobs: begin, go on with the same run, refuse another one, replace it with force."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.runs.identity import CONFIG, LEDGER, LOSSES, REPORT, SUMS, RunConfig
from kvsearch.runs.run import Run, read_sums, require_unchanged
from tests.runs.notes import Notes

ONE = RunConfig(job="evaluate", content={"seed": 1}, execution={"batch": 1})
AGAIN = RunConfig(job="evaluate", content={"seed": 1}, execution={"batch": 2})
OTHER = RunConfig(job="evaluate", content={"seed": 2})
FILES = (REPORT, "*.csv")


def write(directory: Path, config: RunConfig = ONE, *, finish: bool = True, force: bool = False) -> list[str]:
    """Write a note and, to finish, a report; returns the notes."""
    with Run.open(directory, config, force=force, files=FILES) as run, run.open_ledger(Notes) as notes:
        notes.add(f"seed {config.content['seed']}")
        if finish:
            run.write(REPORT, {"notes": notes.count})
            run.finish()
        return notes.lines


def state_of(directory: Path, config: RunConfig = ONE, force: bool = False) -> str:
    with Run.open(directory, config, force=force, files=FILES) as run:
        assert (run.earlier is None) == (run.state == "new")
        return run.state


def test_a_run_begins_goes_on_and_is_finished(tmp_path: Path) -> None:
    assert state_of(tmp_path) == "new"
    assert write(tmp_path, finish=False) == ["seed 1"]
    assert write(tmp_path, AGAIN) == ["seed 1", "seed 1"]
    assert set(read_sums(tmp_path)) == {CONFIG, LEDGER, REPORT}
    assert (tmp_path / CONFIG).read_bytes() == AGAIN.to_bytes()
    assert state_of(tmp_path) == "finished"
    assert not (tmp_path / SUMS).exists()  # who opens a run may write it
    assert state_of(tmp_path) == "unfinished"


def test_force_begins_anew_and_leaves_what_is_not_of_the_run(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "rows.csv").write_text("of the run")
    assert write(tmp_path, OTHER, force=True) == ["seed 2"]
    assert not (tmp_path / "rows.csv").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert state_of(tmp_path, OTHER, force=True) == "new"


def test_what_is_read_again_must_be_what_was_finished(tmp_path: Path) -> None:
    with Run.open(tmp_path, ONE, files=(LOSSES,)) as run:
        run.write(LOSSES, [])
        run.finish()
    require_unchanged(tmp_path, LOSSES, "delete it")
    (tmp_path / LOSSES).write_text("[1]")
    with pytest.raises(UsageError, match=r"losses\.json was changed since it was finished, .*: delete it"):
        require_unchanged(tmp_path, LOSSES, "delete it")
    assert LOSSES in read_sums(tmp_path)
