"""kvsearch reproduce, end to end on the bundled model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvsearch.commands.reproduce import ReproduceOptions, TableStages
from kvsearch.core.resources import find_resource
from kvsearch.models.loading import load
from kvsearch.papers.tables import PAPER_TABLES, Stage
from tests.cli.conftest import Run, done, done_json
from tests.cli.test_bad_input import USAGE, refused

ONE = ("--tasks", "synthetic:single", "--samples", 1, "--length", 512)


def test_the_list_and_all_of_one(run: Run) -> None:
    _, out, _ = run("reproduce", "--list", "--json")
    assert {"evolkv-group-size", "lukv-figures"} <= {table["name"] for table in json.loads(out)["tables"]}
    out, _ = done("reproduce", "--list", "lukv-table3")
    assert "LU-KV (arXiv 2602.08585), Table 3" in out
    assert "numbers of the paper beside: 170" in out
    assert "not as in the paper: " in out


def test_a_table_is_made_once(run: Run, tmp_path: Path) -> None:
    command = ("reproduce", "lava-table13", "bundled", *ONE, "--budgets", "16", "-o", tmp_path)
    assert "(to do)" in run(*command, "--dry-run")[1]
    out, talk = done(*command)
    assert f"next: kvsearch show {tmp_path / 'lava-table13.json'}" in talk
    (stage,) = tmp_path.glob("stages/*")
    assert run("show", tmp_path / "lava-table13.json") == (0, out, "")
    assert run("show", tmp_path) == (0, f"{out}next: kvsearch show {stage}\n", "")
    assert "LAVa-Pyramid" in out
    assert "without the paper's numbers: bundled is none of its models" in " ".join(out.split())
    files = {path.name: path.read_bytes() for path in tmp_path.glob("lava-table13.*")}
    assert set(files) == {f"lava-table13{suffix}" for suffix in (".md", ".tex", ".csv", ".json")}
    assert b"split report, question-aware, evicting in prefill, 1 context with" in files["lava-table13.md"]
    assert "(finished)" in run(*command, "--dry-run")[1]
    ledger = next(tmp_path.glob("stages/*/ledger.jsonl"))
    written = ledger.stat().st_mtime_ns
    assert run(*command)[0] == 0
    assert ledger.stat().st_mtime_ns == written
    assert {path.name: path.read_bytes() for path in tmp_path.glob("lava-table13.*")} == files
    assert run("verify", tmp_path)[0] == 0


def test_the_papers_numbers_are_beside_its_model(tmp_path: Path) -> None:
    model, data, place = tmp_path / "Mistral-7B-Instruct-v0.2", tmp_path / "narrativeqa.jsonl", tmp_path / "runs"
    model.symlink_to(find_resource("data/bundled"))
    row = {"input": "who ?", "context": "the basket " * 100, "answers": ["x"], "all_classes": None, "length": 200}
    data.write_text(json.dumps({**row, "dataset": "narrativeqa", "language": "en", "_id": "1"}))
    asked = ("--tasks", "longbench:narrativeqa", "--data", tmp_path, "--samples", 1, "--budgets", "128")
    found = done_json("reproduce", "lava-table13", model, *asked, "-o", place, "--json")
    cells = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    assert cells["LAVa-Uniform", "narrativeqa"]["paper"] == 20.32
    assert cells["Full", "narrativeqa"]["paper"] == 26.77
    assert cells["LAVa", "average"]["paper"] is None  # it is over other tasks
    assert not any(note.startswith("made smaller") for note in found["notes"])


def test_data_that_are_missing_are_told_first(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "none.jsonl"
    asked = ("reproduce", "lava-table12", find_resource("data/bundled"), "--data", data, "-o", tmp_path / "runs")
    refused(run, USAGE, str(data), *asked)
    refused(run, USAGE, str(data), *asked, "--dry-run")
    assert not (tmp_path / "runs").exists()


# signals and scores, ratios of heads, times, a search with needles: one of each kind
FIGURES = ("polykv-figure1", "lukv-figures7-9", "lava-figure3", "evolkv-figure7")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all figures are made: a search that several read runs once."""
    return tmp_path_factory.mktemp("figures")


LESS = {"generations": [1], "questions": [4], "group_sizes": [3, 6], "lengths": [128, 256], "new_tokens": [2, 4]}


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table has little to ask, to search and to measure; its stages, blocks and rows stay."""
    monkeypatch.setattr("kvsearch.benchmark.speed.COPIED_BYTES", 2**12)
    for name in FIGURES:
        form = PAPER_TABLES[name].bundled
        asks = [{**ask, "tasks": ask["tasks"].replace("synthetic", "synthetic:single")} for ask in form["asks"]]
        searches = [{**ask, "samples": 2} for ask in form["searches"]]
        few = {
            key: LESS[key][: len(value)] if isinstance(value, list) else LESS[key][0]
            for key, value in form.items()
            if key in LESS
        }
        bundled = {**form, **few, "asks": asks, "searches": searches}
        monkeypatch.setitem(PAPER_TABLES, name, replace(PAPER_TABLES[name], bundled=bundled))


@pytest.mark.nightly
@pytest.mark.usefixtures("shorter")
@pytest.mark.parametrize("table", FIGURES)
def test_a_figure_is_made_and_drawn(run: Run, place: Path, tmp_path: Path, table: str) -> None:
    code, _, talk = run("reproduce", table, "bundled", "--samples", 1, "-o", place)
    assert code == 0, talk
    assert run("report", place / f"{table}.json", "-o", tmp_path / "page.html", "--figures", tmp_path)[0] == 0
    stems = {file.stem for file in tmp_path.glob("*.png")}
    assert all(any(stem.startswith(picture.name) for stem in stems) for picture in PAPER_TABLES[table].pictures)


def test_what_a_model_cannot_run_is_left_out() -> None:
    options = {"budgets": "6", "settings": ("window=8",)}
    stage = Stage("scores", "evaluate", "asking", options, ("uniform", "streaming"))
    stages = TableStages(ReproduceOptions.of(table="lava-table2", model="bundled"), [])
    usable, left = stages.usable(stage, load("bundled"))
    assert usable.methods == ("streaming",)
    assert list(left) == ["uniform"]
