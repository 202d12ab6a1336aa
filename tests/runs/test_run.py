"""A run and its directory: begun, gone on with, finished, and what is removed from it."""

from __future__ import annotations

from pathlib import Path

from kvsearch.runs.identity import CONFIG, LEDGER, REPORT, SUMS, RunConfig
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import Run, begin_run, is_unused, read_run, read_sums
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


def test_what_a_killed_run_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()
    (tmp_path / ".kvsearch-12.tmp").write_text("{")
    (tmp_path / ".kvsearch-lock").write_text("{}")
    assert is_unused(tmp_path)
    assert read_run(tmp_path, "evolve") is None
    (tmp_path / LEDGER).write_text("{}\n")
    assert not is_unused(tmp_path)


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    for name in ("report.json", "plan-8.json", "mine.txt", LEDGER):
        (tmp_path / name).write_text("old")
    for name in ("choice-8", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with lock_directory(tmp_path):
        begin_run(tmp_path, ONE, ["report.json", "plan-*.json", "choice-*", "nothing", LEDGER])
    assert {item.name for item in tmp_path.iterdir()} == {CONFIG, "mine.txt", "mine"}
