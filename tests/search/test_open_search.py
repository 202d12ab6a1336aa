"""The directory of a search: one search each, kept safe from other ones, from other processes and from full disks."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.runs.directory import CONFIG, LEDGER, write_json
from kvsearch.runs.identity import SCHEMA, RunConfig
from kvsearch.search.ledger import BEST, PLAN, REPORT, check_search, open_search
from tests.runs.locks import locked_elsewhere

CONTENT: dict[str, Any] = {
    "model": {"name": "tiny", "sha256": "a" * 64},
    "settings": {"budget": 64, "seed": 0, "sigma": 0.3},
    "data": {"search": "b" * 64, "report": "c" * 64},
}
EXECUTION = {"max_evals": 100, "workers": 1}
CONFIGURATION = RunConfig(job="evolve", content=CONTENT, execution=EXECUTION)


def changed(place: str, value: object) -> RunConfig:
    """The configuration with another value at a place such as settings.seed."""
    part, key = place.split(".")
    return RunConfig(job="evolve", content={**CONTENT, part: {**CONTENT[part], key: value}}, execution=EXECUTION)


def begin(directory: Path, config: RunConfig = CONFIGURATION, **how: Any) -> None:
    with open_search(directory, config, **how) as run:
        run.ledger.append("stage", name="was here", begins=True)


def stages(directory: Path) -> list[str]:
    return [json.loads(line)["name"] for line in (directory / LEDGER).read_text().splitlines()]


def test_a_new_run(tmp_path: Path) -> None:
    with open_search(tmp_path / "deep" / "run", CONFIGURATION) as run:
        assert run.directory == tmp_path / "deep" / "run"
        written = json.loads((run.directory / CONFIG).read_text())
        assert (written["schema"], written["job"], written["content"]) == (SCHEMA, "evolve", CONTENT)
        assert (run.directory / LEDGER).read_bytes() == b""
    assert {item.name for item in run.directory.iterdir()} == {CONFIG, LEDGER}


def test_a_run_that_is_there_is_not_touched_unasked(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(UsageError) as found:
        begin(tmp_path)
    assert str(found.value) == (
        f"{tmp_path} holds a search already: --resume to go on with it, --force to start anew, "
        "or choose another directory"
    )
    assert stages(tmp_path) == ["was here"]


def test_going_on(tmp_path: Path) -> None:
    begin(tmp_path, resume=True)  # there is nothing yet: it begins
    begin(tmp_path, resume=True)
    assert stages(tmp_path) == ["was here", "was here"]


def test_limits_and_workers_may_change(tmp_path: Path) -> None:
    begin(tmp_path)
    more = RunConfig(job="evolve", content=CONTENT, execution={"max_evals": 500})
    begin(tmp_path, more, resume=True)
    assert json.loads((tmp_path / CONFIG).read_text())["execution"] == {"max_evals": 500}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed("settings.seed", 1), "settings.seed is 0 there, 1 here"),
        (changed("model.sha256", "f" * 64), f"model.sha256 is '{'a' * 39}... there, '{'f' * 39}... here"),
        (changed("data.report", "d" * 64), "data.report is "),
        (changed("settings.parity", True), "settings.parity is only here"),
        (RunConfig(job="evolve", content={**CONTENT, "data": {}}), "data.report is only there"),
    ],
)
def test_another_search_is_refused(tmp_path: Path, config: RunConfig, words: str) -> None:
    begin(tmp_path)
    before = (tmp_path / CONFIG).read_bytes()
    with pytest.raises(UsageError, match="holds another search: ") as found:
        begin(tmp_path, config, resume=True)
    assert words in str(found.value)
    assert "\n" not in str(found.value)
    assert (tmp_path / CONFIG).read_bytes() == before
    begin(tmp_path, resume=True)  # the file was let go of


def test_force_starts_anew(tmp_path: Path) -> None:
    with open_search(tmp_path, changed("settings.seed", 5)) as run:
        run.ledger.begin("old")
        for name in (BEST, REPORT, PLAN):
            write_json(tmp_path / name, {})
    begin(tmp_path, force=True)
    assert stages(tmp_path) == ["was here"]
    assert {item.name for item in tmp_path.iterdir()} == {CONFIG, LEDGER}
    begin(tmp_path, resume=True)


def test_a_process_that_writes_is_left_alone(tmp_path: Path) -> None:
    begin(tmp_path)
    with locked_elsewhere(tmp_path):
        for how in ({"resume": True}, {"force": True}):
            with pytest.raises(UsageError, match="another kvsearch is writing to"):
                begin(tmp_path, **how)
        assert stages(tmp_path) == ["was here"]


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / CONFIG).write_bytes(RunConfig(job="evaluate", content=CONTENT).to_bytes())
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / LEDGER).write_text('{"kind": "stage", "at": 1, "name": "lost", "begins": true}\n')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / CONFIG).write_text('{"schema": ')
    for name, words in (
        ("file", "is a file: give a directory to write to"),
        ("other", "holds something else than a search: choose another directory"),
        ("evaluation", "holds something else than a search"),
        ("lost", "holds something else than a search"),
        ("torn", r"config.json is not valid JSON at line 1 column \d+: the file ends too early"),
    ):
        for how in ({}, {"resume": True}, {"force": True}):
            before = sorted(tmp_path.rglob("*"))
            for attempt in (check_search, begin):
                with pytest.raises(UsageError, match=words) as found:
                    attempt(tmp_path / name, **how)
                assert "\n" not in str(found.value)
            assert sorted(tmp_path.rglob("*")) == before


def test_resume_and_force_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--resume goes on with a search and --force starts it anew"):
        begin(tmp_path / "new", resume=True, force=True)
    assert not (tmp_path / "new").exists()


def test_what_a_search_leaves_that_was_killed_at_once_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()
    (tmp_path / ".kvsearch-12.tmp").write_text("{")
    check_search(tmp_path)
    begin(tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file either has its new content or the old one, and the error is one line."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_search(tmp_path, CONFIGURATION) as run:
        write_json(tmp_path / BEST, {"value": 1})
        before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for write in (
                lambda: write_json(tmp_path / BEST, {"value": 2}),
                lambda: write_json(tmp_path / REPORT, {}),
                lambda: run.ledger.begin("lost"),
            ):
                with pytest.raises(EnvironmentFault, match="no space left on device, free some space") as found:
                    write()
                assert "\n" not in str(found.value)
        assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before
    begin(tmp_path, resume=True)


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EnvironmentFault, match=r"^cannot write .*run: not a directory, check the disk"):
        begin(tmp_path / "file" / "run")
