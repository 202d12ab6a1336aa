"""kvsearch evaluate, end to end on the bundled model: plans, sweeps, runs that are kept, losses and texts."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from kvsearch.models.loading import OFFLINE_VARIABLES
from kvsearch.plan import load_plan
from tests.cli.conftest import Run, done, done_json
from tests.cli.test_bad_input import refused
from tests.tiny import task_file

SHORT = ("--tasks", "synthetic:multikey", "--length", 512)
INTERRUPTED = 130


def test_scores_and_equal_entries(calibrated: Path, tmp_path: Path) -> None:
    arguments = ("--plan", calibrated / "plan.json", *SHORT, "--samples", 4, "--max-length", 600)
    replies = tmp_path / "run" / "samples.csv"
    result = done_json(
        "evaluate", "bundled", *arguments, "--protocol", "question-aware", "--json", "-o", replies.parent
    )
    assert (result["schema"], result["protocol"]) == ("kvsearch.evaluation/1", "question-aware")
    assert (result["subject"], result["most_tokens"], result["tasks"][0]["truncated"]) == ("plan", 600, 0)
    (block,) = result["blocks"]
    methods = {method["name"]: method for method in block["methods"]}
    held = {name: method["held"]["entries"] for name, method in methods.items()}
    assert held["plan"] == held["uniform"] == held["streaming"]
    assert result["full"]["held"]["entries"] > 4.9 * held["plan"]
    scores = {name: method["scores"]["averages"]["macro"]["mean"] for name, method in methods.items()}
    assert result["full"]["scores"]["tasks"]["multikey"]["mean"] >= scores["plan"] > scores["streaming"]
    rows = list(csv.DictReader(replies.open()))
    assert len(rows) == result["tasks"][0]["questions"] * (1 + len(held))
    assert {row["protocol"] for row in rows} == {"question-aware"}
    assert max(int(row["prompt_tokens"]) for row in rows) < 600


def test_what_a_plan_is_shown_to_lose_at_most(calibrated: Path, tmp_path: Path) -> None:
    """Of two equal plans together the level is shared; a plan that answers all loses what no loss shows."""
    (tmp_path / "again.json").write_bytes((calibrated / "plan.json").read_bytes())
    arguments = ("evaluate", "bundled", "--plan", calibrated / "plan.json", *SHORT, "--samples", 6)
    result = done_json(*arguments, "--plan", tmp_path / "again.json", "--lose-at-most", "99%", "--json")
    assert result["guarantees"].keys() == {"plan", "again"}
    for found in result["guarantees"].values():
        shown = found["guarantee"]
        assert (found["wished"], found["holds"]) == (0.99, True)
        assert shown["loss"] >= 1 - 0.025 ** (1 / 6)  # with 97.5% each
        assert (shown["confidence"], shown["contexts"], shown["tasks"]) == (0.95, 6, {"multikey": 6})
        assert shown["plan_sha256"] == load_plan(calibrated / "plan.json").content_sha256
    out, talk = done(*arguments, "--guarantee")
    assert "6 contexts show a mean loss of at most 39.4 points with 95% confidence if none of them loses" in talk
    assert "plan loses at most " in out
    assert "all plans together" not in out


@pytest.mark.slow
def test_a_sweep_writes_everything(calibrated: Path, tmp_path: Path) -> None:
    tasks = ("--tasks", "synthetic:single,multikey", "--length", 512, "--samples", 2)
    names = ("--methods", f"lukv={calibrated},uniform,lava", "--set", "window=8")
    files = ("-o", tmp_path / "run", "--table", tmp_path / "t.tex", "--losses", "--json")
    out, _ = done("evaluate", "bundled", *names, "--budgets", 64, "--ratios", 0.8, *tasks, *files)
    result = json.loads(out)
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == result
    small, large = result["blocks"]
    assert (small["size"], large["size"]) == ({"budget": 64}, {"ratio": 0.8})
    for block in (small, large):
        assert len({method["held"]["entries"] for method in block["methods"]}) == 1
    assert small["methods"][0]["held"]["entries"] == 64 * 24
    labels = {method["label"] for block in result["blocks"] for method in block["methods"]}
    assert {row["method"] for row in result["losses"]} == labels
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert set(config["content"]["methods"]) == {"full", *labels}
    assert (config["job"], config["options"]["budgets"]) == ("evaluate", "64")
    assert (tmp_path / "run" / "tables.md").read_text().count("80% evicted") == 3
    assert "\\toprule" in (tmp_path / "t.tex").read_text()


@pytest.fixture
def small(tmp_path: Path) -> tuple[object, ...]:
    """A command whose run, with its losses, is there."""
    how = ("--methods", "tova", "--budgets", 64, *SHORT, "--samples", 1)
    asked = ("evaluate", "bundled", *how, "-o", tmp_path / "run")
    done(*asked, "--losses")
    return asked


def test_a_table_is_not_replaced_unasked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "paper.csv"
    file.write_text("mine")
    refused(run, 2, "exists", "evaluate", "bundled", "--methods", "uniform", "--budgets", 64, "--table", file)
    assert file.read_text() == "mine"


def test_losses_stay_in_the_report(small: tuple[object, ...], tmp_path: Path) -> None:
    before = (tmp_path / "run" / "report.json").read_bytes()
    out, _ = done(*small, "--json")
    assert (tmp_path / "run" / "report.json").read_bytes() == before
    assert {row["method"] for row in json.loads(out)["losses"]} == {"tova@64"}
    out, _ = done(*small, "--json", "--force")
    assert "losses" not in json.loads(out)


def test_offline_tasks_do_not_touch_the_network(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether the packages are imported yet or not, and only as long as the command runs."""
    import datasets
    import huggingface_hub

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    for name in OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    asked: list[object] = []

    def refused(*where: object, **_: object) -> None:
        asked.append(where)
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", refused)
    monkeypatch.setattr("socket.socket.connect", refused)
    arguments = ("evaluate", "bundled", "--methods", "tova", "--budgets", 64, "--tasks", "gsm8k", "--samples", 1)
    code, _, talk = run(*arguments, "--offline")
    assert (code, asked) == (2, []), talk
    assert "is not downloaded" in talk
    assert not datasets.config.HF_HUB_OFFLINE
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not set(OFFLINE_VARIABLES) & set(os.environ)


def test_an_interruption_without_a_directory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsearch.evaluation.compare.Evaluation.run", interrupted)
    code, out, talk = run("evaluate", "bundled", "--methods", "tova", "--budgets", 64, *SHORT, "--samples", 1)
    assert (code, out) == (INTERRUPTED, "")
    assert "nothing is kept without --output DIR" in talk


def test_categories_and_ids_of_questions(tmp_path: Path) -> None:
    """Scores by category, ids in the file of replies; other ids are no other questions."""
    file = task_file(tmp_path / "mine.jsonl", 3, 300, 4)
    rows = [json.loads(line) for line in file.read_text().splitlines()]

    def named(ids: str) -> None:
        told = [{**row, "id": f"{ids}{n}", "category": ("odd", "even")[n % 2]} for n, row in enumerate(rows)]
        file.write_text("\n".join(map(json.dumps, told)))

    arguments = (
        "evaluate", "bundled", "--tasks", f"jsonl:{file}", "--methods", "snapkv", "--budgets", 48, "-o",
        tmp_path / "run",
    )  # fmt: skip
    named("q")
    out, _ = done(*arguments, "--json")
    assert sorted(json.loads(out)["full"]["scores"]["categories"]) == ["even", "odd"]
    named("p")
    _, talk = done(*arguments)
    assert "12 replies are there, 12 are needed" in talk
    with (tmp_path / "run" / "samples.csv").open() as told:
        found = {(row["id"], row["category"], row["key"], row["question"]) for row in csv.DictReader(told)}
    assert found == {(f"p{n}", ("odd", "even")[n % 2], str(n // 2), str(n % 2)) for n in range(6)}
