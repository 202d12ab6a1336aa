"""The directory of a search: one search each, kept safe from other ones, from other processes and from full disks."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan import load_plan
from kvsearch.search.run_directory import (
    BEST,
    CONFIG,
    CONFIG_SCHEMA,
    EXECUTION,
    LEDGER,
    PLAN,
    REPORT,
    check_directory,
    open_search,
)
from tests import tiny

CONFIGURATION: dict[str, Any] = {
    "model": {"name": "tiny", "sha256": "a" * 64},
    "settings": {"budget": 64, "seed": 0, "sigma": 0.3},
    "data": {"search": "b" * 64, "report": "c" * 64},
    EXECUTION: {"max_evals": 100, "workers": 1},
}


def changed(place: str, value: object) -> dict[str, Any]:
    """The configuration with another value at a place such as settings.seed."""
    part, key = place.split(".")
    return {**CONFIGURATION, part: {**CONFIGURATION[part], key: value}}


def begin(directory: Path, **how: Any) -> None:
    with open_search(directory, CONFIGURATION, **how) as run:
        run.ledger.append("note", text="was here")


def notes(directory: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (directory / LEDGER).read_text().splitlines()]


def test_a_new_run(tmp_path: Path) -> None:
    with open_search(tmp_path / "deep" / "run", CONFIGURATION) as run:
        assert run.directory == tmp_path / "deep" / "run"
        assert json.loads((run.directory / CONFIG).read_text()) == {**CONFIGURATION, "schema": CONFIG_SCHEMA}
        assert (run.directory / LEDGER).read_bytes() == b""
        assert {item.name for item in run.directory.iterdir()} == {CONFIG, LEDGER}


def test_files_are_replaced(tmp_path: Path) -> None:
    plan = tiny.plan_for(tiny.loaded(), [[9, 7]] * 4)
    with open_search(tmp_path, CONFIGURATION) as run:
        for number in (1, 2):
            run.write_best({"value": number / 3})
            run.write_report({"seed": number})
            run.write_plan(plan)
    assert load_plan(tmp_path / PLAN) == plan
    assert json.loads((tmp_path / BEST).read_text()) == {"value": 2 / 3}
    assert json.loads((tmp_path / REPORT).read_text()) == {"seed": 2}


def test_a_run_that_is_there_is_not_touched_unasked(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(UsageError) as found:
        open_search(tmp_path, CONFIGURATION)
    assert str(found.value) == (
        f"{tmp_path} holds a search already: --resume to go on with it, --force to start anew, "
        "or choose another directory"
    )
    assert notes(tmp_path) == ["was here"]


def test_going_on(tmp_path: Path) -> None:
    begin(tmp_path, resume=True)  # there is nothing yet: it begins
    begin(tmp_path, resume=True)
    assert notes(tmp_path) == ["was here", "was here"]


def test_limits_and_workers_may_change(tmp_path: Path) -> None:
    begin(tmp_path)
    more = changed(f"{EXECUTION}.max_evals", 500)
    open_search(tmp_path, more, resume=True).ledger.close()
    assert json.loads((tmp_path / CONFIG).read_text())[EXECUTION] == more[EXECUTION]
    bare = {key: value for key, value in CONFIGURATION.items() if key != EXECUTION}
    open_search(tmp_path, bare, resume=True).ledger.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed("settings.seed", 1), "settings.seed is 0 there, 1 here"),
        (changed("model.sha256", "f" * 64), f"model.sha256 is '{'a' * 39}... there, '{'f' * 39}... here"),
        (changed("data.report", "d" * 64), "data.report is "),
        (changed("settings.parity", True), "settings.parity is only here"),
        ({**changed("settings.seed", 1), "data": {}}, "data.report is only there"),
    ],
)
def test_another_search_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    begin(tmp_path)
    before = (tmp_path / CONFIG).read_bytes()
    with pytest.raises(UsageError, match="holds another search: ") as found:
        open_search(tmp_path, config, resume=True)
    assert words in str(found.value)
    assert "\n" not in str(found.value)
    assert (tmp_path / CONFIG).read_bytes() == before
    begin(tmp_path, resume=True)  # the file was let go of


def test_force_starts_anew(tmp_path: Path) -> None:
    with open_search(tmp_path, changed("settings.seed", 5)) as run:
        run.ledger.append("note", text="old")
        run.write_best({})
        run.write_report({})
        (tmp_path / PLAN).write_text("{}")
    begin(tmp_path, force=True)
    assert notes(tmp_path) == ["was here"]
    assert {item.name for item in tmp_path.iterdir()} == {CONFIG, LEDGER}
    begin(tmp_path, resume=True)


def test_a_process_that_writes_is_left_alone(tmp_path: Path) -> None:
    with open_search(tmp_path, CONFIGURATION) as run:
        run.ledger.append("note", text="first")
        for how in ({"resume": True}, {"force": True}):
            with pytest.raises(UsageError, match="another kvsearch is writing to"):
                open_search(tmp_path, CONFIGURATION, **how)
        assert notes(tmp_path) == ["first"]


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / CONFIG).write_text('{"schema": "kvsearch.evaluation.config/1"}')
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / LEDGER).write_text('{"kind": "note", "at": 1, "text": "its configuration is gone"}\n')
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
            for attempt in (check_directory, lambda place, **h: open_search(place, CONFIGURATION, **h)):
                with pytest.raises(UsageError, match=words) as found:
                    attempt(tmp_path / name, **how)
                assert "\n" not in str(found.value)
            assert sorted(tmp_path.rglob("*")) == before


def test_resume_and_force_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--resume goes on with a search and --force starts it anew"):
        open_search(tmp_path / "new", CONFIGURATION, resume=True, force=True)
    assert not (tmp_path / "new").exists()


def test_what_a_search_leaves_that_was_killed_at_once_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()
    (tmp_path / ".kvsearch-12.tmp").write_text("{")
    check_directory(tmp_path)
    begin(tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file either has its new content or the old one, and the error is one line."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_search(tmp_path, CONFIGURATION) as run:
        run.write_best({"value": 1})
        before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for write in (
                lambda: run.write_best({"value": 2}),
                lambda: run.write_report({}),
                lambda: run.ledger.append("note", text="lost"),
            ):
                with pytest.raises(EnvironmentFault, match=r"no space left on device[,;] free some space") as found:
                    write()
                assert "\n" not in str(found.value)
        assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before
    begin(tmp_path, resume=True)


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EnvironmentFault, match=r"^cannot write .*run: not a directory; check the disk"):
        open_search(tmp_path / "file" / "run", CONFIGURATION)
