"""A second writer is refused at once: before a model is loaded, whatever is typed, and nothing is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvsearch.models.loading import load
from tests import tiny
from tests.cli.conftest import Run
from tests.cli.test_bad_input import USAGE, refused
from tests.runs.locks import locked_elsewhere
from tests.signals.profiles import make_signals, signal_metadata

PATTERNS = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}, "tova": {}}


@pytest.fixture(scope="module")
def profile() -> bytes:
    return make_signals(signal_metadata(load("bundled").fingerprint, PATTERNS)).to_bytes()


@pytest.fixture
def measured(tmp_path: Path, profile: bytes) -> Path:
    """What a calibration leaves."""
    directory = tmp_path / "polykv"
    directory.mkdir()
    (directory / "profile.safetensors").write_bytes(profile)
    (directory / "config.json").write_text(json.dumps({"model": "bundled", "recipe": {}, "seed": 0}))
    return directory


def refused_in(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch, *command: object) -> None:
    monkeypatch.setattr("kvsearch.models.loading.load", lambda *_: pytest.fail("a model is loaded"))
    with locked_elsewhere(place):
        before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        words = f"another kvsearch is writing to {place} (process {os.getpid()} on "
        assert refused(run, USAGE, words, *command).count("\n") == 1
        assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("more", [(), ("--force",), ("--method", "lava"), ("--method", "polykv", "--budgets", 64)])
def test_calibrate(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]) -> None:
    refused_in(tmp_path / "run", run, monkeypatch, "calibrate", "bundled", "-o", tmp_path / "run", *more)


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_evaluate(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    command = ("evaluate", "bundled", "--methods", "tova", "--budgets", 64, "-o", tmp_path / "run")
    refused_in(tmp_path / "run", run, monkeypatch, *command, *more)


@pytest.mark.parametrize("more", [(), ("--force",), ("--resume",)])
def test_evolve(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    tasks = tiny.task_file(tmp_path / "mine.jsonl", 6, length=100, facts=2)
    command = ("evolve", "bundled", "--budget", 12, "--tasks", f"jsonl:{tasks}", "-o", tmp_path / "run")
    refused_in(tmp_path / "run", run, monkeypatch, *command, *more)


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_validate(measured: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    refused_in(measured, run, monkeypatch, "validate", measured, *more)


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_select(measured: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    place = measured.parent / "chosen"
    command = ("select", measured, "--budget", 24, "-o", measured.parent / "plan.json", "--run", place)
    refused_in(place, run, monkeypatch, *command, *more)
