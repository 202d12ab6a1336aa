"""The directory of a run: what is there is found out before anything is done, and only what a run wrote is removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvsearch.core.errors import EnvironmentFault
from kvsearch.runs.identity import CONFIG, LEDGER, RunConfig
from kvsearch.runs.lock import locked
from kvsearch.runs.run import begin, is_unused, run_in

ONE = RunConfig(job="evaluate", content={"seed": 1})


def test_what_a_killed_run_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()
    (tmp_path / ".kvsearch-12.tmp").write_text("{")
    (tmp_path / ".kvsearch-lock").write_text("{}")
    assert is_unused(tmp_path)
    assert run_in(tmp_path, "evolve") is None
    (tmp_path / LEDGER).write_text("{}\n")
    assert not is_unused(tmp_path)


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    for name in ("report.json", "plan-8.json", "mine.txt", LEDGER):
        (tmp_path / name).write_text("old")
    for name in ("choice-8", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with locked(tmp_path):
        begin(tmp_path, ONE, ["report.json", "plan-*.json", "choice-*", "nothing", LEDGER])
    assert {item.name for item in tmp_path.iterdir()} == {CONFIG, "mine.txt", "mine"}


def test_what_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.json").write_text("old")

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    words = r"cannot write .*report\.json: permission denied, check the permissions"
    with locked(tmp_path), monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(EnvironmentFault, match=words):
            begin(tmp_path, ONE, ["report.json"])
    assert not (tmp_path / CONFIG).exists()
