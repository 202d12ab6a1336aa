"""Bad input, and how runs end: one clear line, the right exit code, and nothing good is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvsearch.core.resources import find_resource
from tests.cli.conftest import Run
from tests.tiny import calibration_file

USAGE, ENVIRONMENT, INCOMPATIBLE, BUG, INTERRUPTED = 2, 3, 4, 1, 130


def refused(run: Run, code: int, words: str, *arguments: object) -> str:
    """Run a command that must fail with `code`, and return its one line about it."""
    got, out, talk = run(*arguments)
    complaint = talk[talk.index("kvsearch: error: ") :]
    assert got == code, talk
    assert words in complaint
    assert "Traceback" not in talk
    assert out == ""
    return complaint


def copy_of_bundled(directory: Path) -> Path:
    return Path(shutil.copytree(find_resource("data/bundled"), directory / "model"))


def test_a_plan_of_another_model(run: Run, calibrated: Path, tmp_path: Path) -> None:
    model = copy_of_bundled(tmp_path)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= 1.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    plan = calibrated / "plan.json"
    message = refused(run, INCOMPATIBLE, "another model", "generate", model, "--plan", plan, "--context", "the fox .")
    assert f"'bundled', and this is {str(model)!r}: it has other weights (" in message
    other = tmp_path / "other.json"
    assert run("plan", "uniform", model, "--policy", "snapkv", "--budget", 64, "-o", other)[0] == 0
    message = refused(run, INCOMPATIBLE, "another model", "evaluate", "bundled", "--plan", other)
    assert f"{str(model)!r}, and this is 'bundled': it has other weights (" in message


@pytest.mark.parametrize("method", ["lukv", "probe"])
def test_texts_that_do_not_suit_the_model(run: Run, tmp_path: Path, method: str) -> None:
    """Found out before anything is measured, or while it is: the directory, and those above it, go again."""
    short = calibration_file(tmp_path / "texts.json", 1, length=12)
    code, _, talk = run("calibrate", "bundled", "--method", method, "--data", short, "-o", tmp_path / "deep" / "run")
    assert code in (USAGE, INCOMPATIBLE), talk
    assert not (tmp_path / "deep").exists()


def test_a_bug_is_no_request_that_cannot_be_done(
    run: Run, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun stays, and can be looked at."""

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("kvsearch.commands.calibrate._check_table", broken)
    asked = ("calibrate", "bundled", "--data", inputs / "texts.json", "--method", "query_statistics")
    assert run(*asked, "-o", tmp_path / "run")[0] == BUG
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
