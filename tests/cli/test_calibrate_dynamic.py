"""Calibrating lava, cake and adakv from the command line, on the bundled model and short contexts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsearch.cli.console import Console
from kvsearch.plan import Profile, load_plan, load_profile
from kvsearch.report.profile import profile_parts
from tests import tiny
from tests.cli.conftest import Run, invoke

METHODS = ("lava", "cake", "adakv")
CONTEXTS, QUESTIONS = 3, 2
methods = pytest.mark.parametrize("method", METHODS)
Calibrated = Callable[..., Path]


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file of short contexts in the bundled model's language."""
    data = tiny.calibration_data(200, 220, 240, questions=QUESTIONS)
    contexts = [
        {"text": c.text, "questions": [{"question": p.question, "answer": p.answer} for p in c.questions]}
        for c in data.contexts
    ]
    path = tmp_path_factory.mktemp("short") / "short.json"
    path.write_text(json.dumps({"name": "short", "prompt": data.prompt, "contexts": contexts}))
    return path


@pytest.fixture(scope="session")
def calibrated_by(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """The directory of a calibration by a method with options; each is run once."""
    known: dict[tuple[object, ...], Path] = {}

    def directory(*arguments: object) -> Path:
        if arguments not in known:
            known[arguments] = tmp_path_factory.mktemp("dynamic") / "run"
            code, _, talk = invoke("calibrate", "bundled", "-o", known[arguments], "--data", short, *arguments)
            assert code == 0, talk
        return known[arguments]

    return directory


def profile_in(directory: Path) -> Profile:
    return load_profile(directory / "profile.safetensors")


def shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    Console().out.print_parts(profile_parts(profile_in(directory)))
    return capsys.readouterr().out


@methods
def test_calibrate_export_and_show(
    method: str, run: Run, calibrated_by: Calibrated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = calibrated_by("--method", method)
    config = json.loads((directory / "config.json").read_text())["content"]
    assert (config["recipe"]["method"], config["recipe"]["protocol"]) == (method, "question-agnostic")
    assert config["recipe"]["policy"] == {"adakv": "snapkv"}.get(method, method)
    made = profile_in(directory)
    assert (made.metadata.method, made.metadata.questions, made.metadata.floor) == (method, CONTEXTS, 32)
    for target, total in ((("--ratio", 0.7, "--length", 1000), 300 * 24), (("--budget", 50), 50 * 24)):
        path = tmp_path / f"{total}.json"
        code, out, talk = run("export", directory, *target, "-o", path, "--json")
        assert code == 0, talk
        assert json.loads(out)["total"] == load_plan(path).total == total
    page = shown(directory, capsys)
    for title in ("local eviction ratio at 0.8", "standard deviation of the local eviction ratio", "rank correlation"):
        assert title in page
    assert "\x1b" not in page
