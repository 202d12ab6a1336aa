"""The public Python API: a dozen names, which the commands call, too."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import kvsearch
from kvsearch.core.errors import UsageError

VERBS = ("bench", "calibrate", "compress", "evaluate", "evolve", "export", "reproduce", "run", "select", "validate")


def test_every_name_is_there() -> None:
    assert dir(kvsearch) == sorted(kvsearch.__all__)
    assert all(getattr(kvsearch, name) is not None for name in kvsearch.__all__)
    assert kvsearch.__version__ == version("kvsearch")
    with pytest.raises(AttributeError, match="no attribute 'calibrates'"):
        _ = kvsearch.calibrates  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_the_options_of_its_command(verb: str) -> None:
    """Keywords and flags are made of the same fields."""
    parameters = inspect.signature(getattr(kvsearch, verb)).parameters
    shown = subprocess.run(
        [sys.executable, "-m", "kvsearch", verb, "--help"], capture_output=True, text=True, check=True,
        env={"COLUMNS": "200", "PATH": "", "PYTHONPATH": str(Path(kvsearch.__file__).parents[1])},
    ).stdout  # fmt: skip
    flags = {word.strip("*│ ") for word in shown.split() if word.startswith("--")}
    named = {"export": ("output", "budget"), "bench": ("batch", "device")}
    for name in named.get(verb, ("seed", "device")):
        assert name in parameters
        assert f"--{name}" in flags
    assert "reporter" in parameters


def test_calibrate_then_export(tmp_path: Path) -> None:
    profile = kvsearch.calibrate("bundled", output=tmp_path / "run", questions=2, policy="keydiff")
    assert profile.metadata.questions == 2
    assert profile.to_bytes() == kvsearch.load_profile(tmp_path / "run" / "profile.safetensors").to_bytes()
    plan = kvsearch.export(tmp_path / "run", ratio=0.8, output=tmp_path / "plan.json")
    assert kvsearch.load_plan(tmp_path / "plan.json") == plan


def test_the_configuration_of_a_run_is_a_recipe(tmp_path: Path) -> None:
    first = kvsearch.calibrate("bundled", output=tmp_path / "one", questions=2, normalization="layer")
    again = kvsearch.calibrate(recipe=tmp_path / "one" / "config.json", output=tmp_path / "two")
    assert again.to_bytes() == first.to_bytes()
    with pytest.raises(UsageError, match="is of kvsearch calibrate, not of evaluate"):
        kvsearch.evaluate(recipe=tmp_path / "one" / "config.json")


def test_wrong_options_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        kvsearch.evaluate("bundled", samples=0, batch=0, colour="red")
    assert all(words in str(caught.value) for words in ("--samples: ", "--batch: ", "colour: unknown key"))
