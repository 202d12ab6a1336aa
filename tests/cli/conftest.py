"""One calibration of the bundled model, shared by all tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsearch.cli import app

Run = Callable[..., tuple[int, str, str]]


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def run() -> Run:
    return invoke


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the profile of the bundled model (eight questions) and plans made of it."""
    directory = tmp_path_factory.mktemp("calibrated") / "run"
    code, _, talk = invoke("calibrate", "bundled", "-o", directory, "--questions", 8)
    assert code == 0, talk
    code, _, talk = invoke("export", directory, "--ratio", 0.8, "-o", directory / "plan.json")
    assert code == 0, talk
    return directory
