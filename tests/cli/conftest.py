"""Commands, and one calibration of the bundled model that all tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsearch.cli import app
from tests.runs.guard import every_write_locked
from tests.shared import finished_once

Run = Callable[..., tuple[int, str, str]]


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command; whatever it writes, it has the lock for it."""
    with every_write_locked(arguments) as outside:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert outside == []
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def run() -> Run:
    return invoke


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the profile of the bundled model (four questions) and plans made of it."""

    def make(folder: Path) -> tuple[int, str, str]:
        directory = folder / "run"
        code, out, talk = invoke("calibrate", "bundled", "-o", directory, "--questions", 4)
        if code:
            return code, out, talk
        return invoke("export", directory, "--ratio", 0.8, "-o", directory / "plan.json")

    return finished_once(tmp_path_factory, "calibrated", make).folder / "run"
