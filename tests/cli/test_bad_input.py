"""Bad input: one clear line, the right exit code, and nothing good is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvsearch.core.resources import resource
from tests.cli.conftest import Run

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
    return Path(shutil.copytree(resource("data/bundled"), directory / "model"))


# --- models -------------------------------------------------------------------------------------------------------


# --- calibration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "lukw"), "unknown method 'lukw'; did you mean 'lukv'?"),
        (("--policy", "full"), "evicts nothing"),
        (("--set", "windw=3"), "did you mean 'window'?"),
        (("--set", "window"), "not of the form key=value"),
        (("--normalization", "layers"), "did you mean 'layer'?"),
        (("--recipe", "none.yaml"), "none.yaml"),
        (("--set", "window=600"), "too short"),
    ],
)
def test_bad_calibration(run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    refused(run, USAGE, words, "calibrate", "bundled", "-o", tmp_path / "run", *arguments)


def test_an_output_that_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(run, USAGE, "is a file", "calibrate", "bundled", "-o", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- plans and profiles -------------------------------------------------------------------------------------------


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


def test_a_plan_of_the_same_model_under_another_name(run: Run, tmp_path: Path) -> None:
    """Weights and shape decide, in both directions."""
    model = copy_of_bundled(tmp_path)
    for made, used in ((model, "bundled"), ("bundled", model)):
        assert run("plan", "uniform", made, "--policy", "snapkv", "--budget", 64, "-o", tmp_path / "p.json")[0] == 0
        code, _, talk = run("generate", used, "--plan", tmp_path / "p.json", "--prompt", "the fox", "--context", "a")
        assert code == 0, talk
        (tmp_path / "p.json").unlink()


# --- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tasks", "synthetic:multkey"), "did you mean 'multikey'?"),
        (("--tasks", "jsonl:no.jsonl"), "no.jsonl"),
        (("--length", "100"), "at least 512"),
        (("--samples-file", "replies.json"), "name a .csv file"),
    ],
)
def test_bad_evaluations(run: Run, calibrated: Path, arguments: tuple[str, ...], words: str) -> None:
    refused(run, USAGE, words, "evaluate", "bundled", "--plan", calibrated / "plan.json", *arguments)


def test_a_question_that_does_not_fit(run: Run, calibrated: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"context": "a fox . " * 9, "question": "who ?", "answers": ["fox"]}))
    tasks = f"jsonl:{tmp_path / 't.jsonl'}"
    arguments = ("--plan", calibrated / "plan.json", "--tasks", tasks, "--max-length", 5)
    refused(run, INCOMPATIBLE, "leave no room for the context within 5 tokens", "evaluate", "bundled", *arguments)


# --- the machine --------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_plan(
    run: Run, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("export", calibrated, "--ratio", 0.5, "-o", tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(run, ENVIRONMENT, "full", "export", calibrated, "--ratio", 0.6, "-o", tmp_path / "plan.json", "--force")
    assert (tmp_path / "plan.json").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]
