"""Calibrating from the command line on short contexts, and everything that is done with a ranking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.plan import load_plan, load_profile
from kvsearch.plan import saved as weights
from kvsearch.plan.origin import hash_context
from tests.cli.conftest import Run, done
from tests.cli.test_bad_input import USAGE, refused
from tests.tiny import calibration_file

CONTEXTS = 3


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file of short contexts in the bundled model's language."""
    return calibration_file(tmp_path_factory.mktemp("short") / "short.json", CONTEXTS, length=200)


def test_calibrate_export_and_show(short: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done("calibrate", "bundled", "-o", directory, "--data", short, "--method", "lava")
    recipe = json.loads((directory / "config.json").read_text())["content"]["recipe"]
    assert (recipe["method"], recipe["policy"], recipe["protocol"]) == ("lava", "lava", "question-agnostic")
    made = load_profile(directory / "profile.safetensors").metadata
    assert (made.method, made.questions, made.floor) == ("lava", CONTEXTS, 32)
    for target, total in ((("--ratio", 0.7, "--length", 1000), 300 * 24), (("--budget", 50), 50 * 24)):
        path = tmp_path / f"{total}.json"
        out, _ = done("export", directory, *target, "-o", path, "--json")
        assert json.loads(out)["total"] == load_plan(path).total == total
    page, _ = done("show", directory)
    for title in ("local eviction ratio at 0.8", "standard deviation of the local eviction ratio", "rank correlation"):
        assert title in page
    assert "\x1b" not in page


def test_methods_take_tasks(inputs: Path, tmp_path: Path) -> None:
    """Its own questions, of the train split; the profile knows its contexts."""
    questions = inputs / "mine.jsonl"
    tasks = ("--tasks", f"jsonl:{questions}+synthetic:multikey", "--length", 512, "--samples", 2)
    polykv = ("--method", "polykv", "--budgets", 48, "--patterns", "snapkv,h2o")
    _, talk = done("calibrate", "bundled", *polykv, "-o", tmp_path / "p", *tasks)
    assert "evaluate asks all examples" in talk
    origin = load_profile(tmp_path / "p" / "profile.safetensors").metadata.provenance
    assert origin.settings["data"] == "mine+multikey"
    fitted = json.loads((tmp_path / "p" / "contexts.json").read_text())["fitted"]
    assert len(fitted) == 4
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    assert len(set(fitted) & {hash_context(row["context"]) for row in rows}) == 2
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert (config["options"]["tasks"], config["content"]["data"]) == (tasks[1], "mine+multikey")
    done("show", tmp_path / "p")


@pytest.fixture(scope="module")
def ranking(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probe") / "run"
    _, talk = done(
        "calibrate", "bundled", "--method", "probe", "-o", directory, "--data", short, "--form", "linear",
        "--entries", 300, "--answer-tokens", 2,
    )  # fmt: skip
    assert "fitted on 1 context, chosen on 1, reported on 1" in talk
    assert f"next: kvsearch calibrate bundled --policy probe={directory} -o {directory}-budgets" in talk
    out, _ = done("show", directory, "--json")
    assert json.loads(out)["tables"][0]["header"] == ["ranking", "5%", "10%", "20%"]
    return directory


def test_a_plan_of_it_runs_in_another_folder(
    run: Run, ranking: Path, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--data", short, "--questions", 2, "--answers", "given")
    done("calibrate", "bundled", "--policy", f"probe={ranking}", "-o", tmp_path / "lukv", *few)
    done("export", tmp_path / "lukv", "--ratio", 0.8, "-o", tmp_path / "plan.json")
    monkeypatch.setattr(weights, "_known", {})  # as in a process of its own
    out, _ = done(
        "generate", "bundled", "--plan", tmp_path / "plan.json", "--prompt", "code of ash ?", "--context",
        "the code of ash is red . " * 20, "--max-new-tokens", 2, "--json",
    )  # fmt: skip
    assert json.loads(out)["entries"] < 24 * 120
    (beside,) = tmp_path.glob("probe-*.safetensors")
    beside.rename(tmp_path / "elsewhere.safetensors")
    monkeypatch.setattr(weights, "_known", {})
    refused(run, USAGE, f"needs the weights {beside.name} beside it", "show", tmp_path / "plan.json")
