"""Calibrating lava, cake and adakv from the command line, on the bundled model and short contexts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.cli.console import Console
from kvsearch.plan import Profile, load_plan, load_profile
from kvsearch.plan.origin import context_hash
from kvsearch.report.profile import profile_parts
from tests import tiny
from tests.cli.conftest import done
from tests.robustness.inputs import calibration_file

CONTEXTS = 3


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file of short contexts in the bundled model's language."""
    return calibration_file(tmp_path_factory.mktemp("short") / "short.json", CONTEXTS, length=200)


def profile_in(directory: Path) -> Profile:
    return load_profile(directory / "profile.safetensors")


def shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    Console().out.print_parts(profile_parts(profile_in(directory)))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "method", ["lava", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("cake", "adakv"))]
)
def test_calibrate_export_and_show(
    method: str, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    done("calibrate", "bundled", "-o", directory, "--data", short, "--method", method)
    config = json.loads((directory / "config.json").read_text())["content"]
    assert (config["recipe"]["method"], config["recipe"]["protocol"]) == (method, "question-agnostic")
    assert config["recipe"]["policy"] == {"adakv": "snapkv"}.get(method, method)
    made = profile_in(directory)
    assert (made.metadata.method, made.metadata.questions, made.metadata.floor) == (method, CONTEXTS, 32)
    for target, total in ((("--ratio", 0.7, "--length", 1000), 300 * 24), (("--budget", 50), 50 * 24)):
        path = tmp_path / f"{total}.json"
        out, _ = done("export", directory, *target, "-o", path, "--json")
        assert json.loads(out)["total"] == load_plan(path).total == total
    page = shown(directory, capsys)
    for title in ("local eviction ratio at 0.8", "standard deviation of the local eviction ratio", "rank correlation"):
        assert title in page
    assert "\x1b" not in page


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", 20, 140, 3)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(("lukv",), marks=pytest.mark.nightly),
        ("lava",),
        pytest.param(("cake",), marks=pytest.mark.nightly),
        pytest.param(("adakv",), marks=pytest.mark.nightly),
        ("polykv", "--budgets", 48, "--patterns", "snapkv,h2o"),
    ],
)
def test_every_method_takes_tasks(questions: Path, tmp_path: Path, method: tuple[object, ...]) -> None:
    """Its own questions, of the train split; the profile knows its contexts."""
    tasks = ("--tasks", f"jsonl:{questions}+synthetic:multikey", "--length", 512, "--samples", 2)
    _, talk = done("calibrate", "bundled", "--method", *method, "-o", tmp_path / "p", *tasks)
    assert "evaluate asks all examples" in talk
    origin = load_profile(tmp_path / "p" / "profile.safetensors").metadata.provenance
    assert origin.settings["data"] == "mine+multikey"
    fitted = json.loads((tmp_path / "p" / "contexts.json").read_text())["fitted"]
    assert len(fitted) == 4
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    assert len(set(fitted) & {context_hash(row["context"]) for row in rows}) == 2
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert (config["options"]["tasks"], config["content"]["data"]) == (tasks[1], "mine+multikey")
    done("show", tmp_path / "p")
