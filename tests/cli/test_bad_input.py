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


def test_missing_model(run: Run, tmp_path: Path) -> None:
    refused(
        run, ENVIRONMENT, "neither a local directory nor", "calibrate", "no/such", "-o", tmp_path / "a", "--offline"
    )


def test_a_directory_that_is_no_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(run, INCOMPATIBLE, "no config.json", "generate", tmp_path / "empty", "--prompt", "hello")


def test_nan_weights(run: Run, tmp_path: Path) -> None:
    model = copy_of_bundled(tmp_path)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    refused(run, INCOMPATIBLE, "NaN or infinite values in model.norm", "generate", model, "--prompt", "code amber")


def test_truncated_weights(run: Run, tmp_path: Path) -> None:
    model = copy_of_bundled(tmp_path)
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(run, INCOMPATIBLE, "cannot be loaded", "generate", model, "--prompt", "code amber")


def test_a_device_that_is_not_there(run: Run) -> None:
    import torch

    if not torch.cuda.is_available():
        refused(run, ENVIRONMENT, "this machine has none", "generate", "bundled", "--device", "cuda")


def test_dtype_and_device_map(run: Run) -> None:
    refused(run, USAGE, "dtype 'int8'", "generate", "bundled", "--dtype", "int8")
    refused(run, USAGE, "device map 'round'", "generate", "bundled", "--device-map", "round")
    refused(run, USAGE, "not both", "generate", "bundled", "--device-map", "auto", "--device", "cpu")


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


def test_truncated_plan_and_profile(run: Run, calibrated: Path, tmp_path: Path) -> None:
    for name, command in (("plan.json", "show"), ("profile.safetensors", "show")):
        data = (calibrated / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        refused(run, USAGE, name, command, tmp_path / name)
    refused(run, USAGE, "no file", "show", tmp_path / "nothing.json")


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


def test_a_context_longer_than_the_model_takes(run: Run) -> None:
    arguments = ("--tasks", "synthetic:single", "--samples", 1, "--length", 6000)
    refused(run, USAGE, "prompts of 6000 tokens, bundled takes 4096: lower --length", "headroom", "bundled", *arguments)


def test_a_comparison_that_says_nothing_is_called_so(run: Run, calibrated: Path, tmp_path: Path) -> None:
    context = "the calm fox greets the nurse in barn . " * 40
    (tmp_path / "t.jsonl").write_text(json.dumps({"context": context, "question": "who ?", "answers": ["nobody"]}))
    tasks = f"jsonl:{tmp_path / 't.jsonl'}"
    code, _, talk = run("evaluate", "bundled", "--plan", calibrated / "plan.json", "--tasks", tasks, "--json")
    assert code == INCOMPATIBLE
    assert "the full cache itself scores 0.00" in talk


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


def test_a_bug_is_called_a_bug(run: Run, calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.jobs.export.load_profile", lambda _: 1 / 0)
    refused(run, BUG, "a bug in kvsearch", "export", calibrated, "--ratio", 0.5, "-o", "x.json")
