"""Commands, and what all tests of the command line share: one calibration of the bundled model, and inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsearch.cli import app
from kvsearch.models.loading import load
from tests import tiny
from tests.runs.guard import every_write_locked
from tests.shared import Finished, finished_once, folder_once
from tests.signals.profiles import make_signals, signal_metadata
from tests.tiny import calibration_file

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}, "tova": {}}
# a tenth of the time of the default
QUICKLY = ("--questions", 2, "--no-check", "--normalization", "layer", "--answer-tokens", 2)
Run = Callable[..., tuple[int, str, str]]


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command; whatever it writes, it has the lock for it."""
    with every_write_locked(arguments) as outside:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert outside == []
    return result.exit_code, result.stdout, result.stderr


def done(*arguments: object) -> tuple[str, str]:
    """Standard output and standard error of a command that ends well."""
    code, out, talk = invoke(*arguments)
    assert code == 0, talk
    return out, talk


def done_json(*arguments: object) -> Any:
    """What a command that ends well prints as JSON."""
    return json.loads(done(*arguments)[0])


@pytest.fixture
def run() -> Run:
    return invoke


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the profile of the bundled model (two questions) and plans made of it."""

    def make(folder: Path) -> tuple[int, str, str]:
        directory = folder / "run"
        code, out, talk = invoke("calibrate", "bundled", "-o", directory, *QUICKLY)
        if code:
            return code, out, talk
        return invoke("export", directory, "--ratio", 0.8, "-o", directory / "plan.json")

    return finished_once(tmp_path_factory, "calibrated", make).folder / "run"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, texts and a calibration, in the bundled model's language."""

    def fill(folder: Path) -> None:
        tiny.task_file(folder / "mine.jsonl", 40, length=100, facts=3)
        calibration_file(folder / "texts.json", 4)
        polykv_in(folder / "polykv", budgets=(24,))

    return folder_once(tmp_path_factory, "verbs", fill)


def polykv_in(
    directory: Path, patterns: Mapping[str, dict[str, Any]] = PATTERNS, made: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:  # fmt: skip
    """What a calibration of the bundled model by polykv leaves; `made` are arrays of its profile."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = signal_metadata(load("bundled").fingerprint, dict(patterns), **changes)
    (directory / "profile.safetensors").write_bytes(make_signals(metadata, **(made or {})).to_bytes())
    (directory / "config.json").write_text(json.dumps({"model": "bundled", "recipe": {"method": "polykv"}, "seed": 0}))
    return directory


SEARCH = "--budget 12 --set window=4 --group-size 2 --generations 2 --finalists 3 --samples 4"


@pytest.fixture(scope="session")
def evolved(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Finished:
    """A search of the bundled model, in the folder `run`."""

    def make(folder: Path) -> tuple[int, str, str]:
        asked = ("--tasks", f"jsonl:{inputs / 'mine.jsonl'}", "-o", folder / "run")
        return invoke("evolve", "bundled", *SEARCH.split(), *asked)

    return finished_once(tmp_path_factory, "evolved", make)
