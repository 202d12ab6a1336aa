"""evaluate --records: the files of kvpress' evaluation, scored again by its rules."""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Run, done_json
from tests.cli.test_bad_input import refused

TEXT = "the calm fox greets the nurse in barn . silver : helmet trumpet . "
COLUMNS = [
    "task", "question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer", "compression_ratio", "score",
]  # fmt: skip


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Rows of two tasks, as kvpress publishes those of one length."""
    folder = tmp_path / "ruler" / "4096"
    folder.mkdir(parents=True)
    rows = [
        {"task": task, "context": TEXT * (12 + copies), "question": "silver :", "answer_prefix": " helmet",
         "answer": answers, "max_new_tokens": 4}
        for copies in range(3)
        for task, answers in (("vt", ["the", "trumpet"]), ("qa_1", ["the", "nobody"]))
    ]  # fmt: skip
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def string_match(row: dict[str, str]) -> float:
    """The share of the answers that are in the reply, or whether one is, by RULER's rules in kvpress."""
    reply = row["predicted_answer"].lower()
    found = [answer.lower() in reply for answer in ast.literal_eval(row["answer"])]
    return float(max(found)) if row["task"].startswith("qa") else sum(found) / len(found)


def read(folder: Path) -> tuple[list[dict[str, str]], Any, Any]:
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    return rows, json.loads((folder / "metrics.json").read_text()), settings


def test_records_say_what_the_table_says(drawn: Path, tmp_path: Path) -> None:
    asked = ("evaluate", "bundled", "--methods", "snapkv,streaming", "--ratios", "0.5,0.502", "--samples", 3)
    places = ("--records", tmp_path / "records", "-o", tmp_path / "run")
    words = (*asked, "--tasks", f"ruler:file={drawn}", *places, "--json")
    result = done_json(*words)
    named = {folder.name: folder for folder in (tmp_path / "records").iterdir() if folder.is_dir()}
    stem = "ruler__4096__bundled__"
    methods = ["snapkv__0.50", "snapkv__0.50__snapkv@0.502", "streaming__0.50", "streaming__0.50__streaming@0.502"]
    assert sorted(named) == sorted(stem + name for name in ("no_press__0.00", *methods))
    tasks = result["blocks"][0]["methods"][0]["scores"]["tasks"]
    for name, folder in named.items():
        rows, metrics, settings = read(folder)
        assert [*rows[0]] == COLUMNS
        assert [row["task"] for row in rows] == ["vt"] * 3 + ["qa_1"] * 3
        scores = {task: [string_match(row) for row in rows if row["task"] == task] for task in ("vt", "qa_1")}
        assert metrics == {task: {"string_match": round(100 * sum(mine) / 3, 2)} for task, mine in scores.items()}
        assert all(float(row["score"]) == string_match(row) for row in rows)
        assert settings["press_name"] in name
        assert {float(row["compression_ratio"]) for row in rows} == {settings["compression_ratio"]}
    assert read(named[stem + "snapkv__0.50"])[1] == {
        task: {"string_match": round(100 * tasks[task]["mean"], 2)} for task in ("vt", "qa_1")
    }


def test_what_is_refused(run: Run, drawn: Path, tmp_path: Path) -> None:
    """Records are not replaced unasked, and of a folder of several lengths one is named."""
    records = tmp_path / "records"
    records.mkdir()
    (records / "notes").write_text("")
    words = ("evaluate", "bundled", "--methods", "uniform", "--budgets", 64, "--tasks")
    given = (*words, f"ruler:file={drawn}", "--records")
    refused(run, 2, "records is not empty: name another folder, or --force", *given, records)
    refused(run, 2, "notes is a file", *given, records / "notes")
    refused(run, 2, "has a folder for each of 4096: give ruler:file=FILE", *words, f"ruler:file={drawn.parent}")
