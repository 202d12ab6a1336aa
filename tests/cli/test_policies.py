"""Policies and plans that are refused before any model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.plan import Plan, save_plan
from tests.cli.conftest import Run
from tests.plan.builders import plan_dict

NO_MODEL = "/no/such/model"  # loading it would end with another exit code
USAGE, ENVIRONMENT = 2, 3


def write_plan(path: Path, *layers: tuple[str, dict[str, Any], list[int]]) -> Path:
    content = plan_dict([budget for _, _, budget in layers])
    for made, (name, params, _) in zip(content["prefill"]["layers"], layers, strict=True):
        made["policy"] = {"name": name, "params": params}
    save_plan(Plan.model_validate(content), path)
    return path


def complaint(run: Run, *arguments: object) -> str:
    """What a command says that must fail before it looks for its model."""
    code, out, talk = run(*arguments)
    assert (code, out) == (USAGE, ""), talk
    return talk.removeprefix("kvsearch: error: ")


# --- refused before a model is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "evaluate", "show"])
def test_a_plan_is_checked_before_its_model_is_loaded(run: Run, tmp_path: Path, command: str) -> None:
    bad = write_plan(
        tmp_path / "bad.json", ("snapk", {}, [9, 9]), ("snapkv", {"kernel": 4}, [9, 9]), ("snapkv", {}, [9, 40])
    )
    arguments = ("show", bad) if command == "show" else (command, NO_MODEL, "--plan", bad)
    told = complaint(run, *arguments, *(("--prompt", "hello") if command == "generate" else ()))
    assert told.splitlines()[0] == f"{bad} is not valid, 3 problems:"
    for words in (
        "prefill.layers.0.policy: unknown policy 'snapk'; did you mean 'snapkv'?",
        "prefill.layers.1.policy: policy snapkv: kernel must be odd, got 4",
        "prefill.layers.2.budget: is 9 at head 0, below the 32 entries that snapkv always keeps",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("recipe", "arguments", "words"),
    [
        ("policy: snapkv\nparams: {windw: 3}", (), "no parameter 'windw'; did you mean 'window'?"),
        ("policy: snapkv", ("--policy", "kejdiff"), "did you mean 'keydiff'?"),
    ],
)
def test_recipes_are_checked_before_the_model_is_loaded(
    run: Run, tmp_path: Path, recipe: str, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "r.yaml").write_text(recipe)
    given = ("--recipe", tmp_path / "r.yaml", *arguments)
    assert words in complaint(run, "calibrate", NO_MODEL, "-o", tmp_path / "run", *given)
    assert not (tmp_path / "run").exists()


def test_calibrating_knorm_for_a_model_that_normalises_keys_warns(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise UsageError("far enough")

    monkeypatch.setattr("kvsearch.runtime.program.normalises_keys", lambda model: True)
    monkeypatch.setattr("kvsearch.calibration.lukv.measure_importance", stop)
    _, _, talk = run("calibrate", "bundled", "-o", tmp_path / "run", "--policy", "knorm", "--questions", 1)
    lines = [line for line in talk.splitlines() if "warning" in line.lower()]
    assert len(lines) == 1
    assert lines[0].startswith("kvsearch: warning: ")
    assert "knorm" in lines[0]
    assert ".py" not in talk
