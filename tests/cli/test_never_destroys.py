"""No command writes over something of another kind, whether or not it is given --force."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.runs.directory import begin
from kvsearch.runs.identity import RunConfig
from kvsearch.runs.lock import locked
from tests.cli.conftest import Run
from tests.cli.test_bad_input import USAGE, refused

FORCED: dict[str, tuple[str, ...]] = {
    "calibrate": ("calibrate", "bundled", "--force", "-o"),
    "evaluate": ("evaluate", "bundled", "--methods", "uniform", "--budgets", "64", "--force", "-o"),
    "evolve": ("evolve", "bundled", "--budget", "64", "--force", "-o"),
    "run": ("run", "bundled", "--budget", "64", "--force", "-o"),
}


def model_of_mine(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')


def another_run(directory: Path) -> None:
    directory.mkdir()
    with locked(directory):
        begin(directory, RunConfig(job="select", content={"seed": 1}))


def thesis(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("mine")


@pytest.mark.parametrize("there", [model_of_mine, another_run, thesis])
@pytest.mark.parametrize("verb", FORCED)
def test_a_directory_of_something_else_is_kept(run: Run, tmp_path: Path, verb: str, there: object) -> None:
    directory = tmp_path / "mine"
    assert callable(there)
    there(directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    told = refused(run, USAGE, "holds something else than", *FORCED[verb], directory)
    assert "--force" in told
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("flag", ["--table", "--samples-file"])
def test_a_table_is_not_replaced_unasked(run: Run, tmp_path: Path, flag: str) -> None:
    file = tmp_path / "paper.csv"
    file.write_text("mine")
    asked = ("evaluate", "bundled", "--methods", "uniform", "--budgets", 64, flag, file)
    refused(run, USAGE, "exists: choose another file, or --force to replace it", *asked)
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        begin(tmp_path / "run", RunConfig(job="evaluate", content={}))
    told = refused(run, USAGE, "exists: choose another file, or delete it", *asked, "-o", tmp_path / "run")
    assert "--force starts the run" in told
    assert file.read_text() == "mine"


def test_a_log_goes_to_the_end_of_a_log_and_nowhere_else(run: Run, tmp_path: Path) -> None:
    mine, log = tmp_path / "plan.json", tmp_path / "log.txt"
    mine.write_text("{}")
    refused(run, USAGE, "holds something else than a log of kvsearch", "policies", "snapkv", "--log-file", mine)
    assert mine.read_text() == "{}"
    for _ in range(2):
        assert run("policies", "snapkv", "--log-file", log)[0] == 0
    assert log.read_text().count("kvsearch began: ") == 2


def test_select_keeps_nothing_in_a_run_of_another_kind(run: Run, calibrated: Path, tmp_path: Path) -> None:
    another_run(tmp_path / "run")
    code, *_ = run("select", calibrated, "-o", tmp_path / "p.json", "--run", tmp_path / "run")
    assert code == USAGE
    assert json.loads((tmp_path / "run" / "config.json").read_text())["job"] == "select"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
