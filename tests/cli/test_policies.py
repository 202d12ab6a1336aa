"""What is said of a policy that does not suit a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from tests.cli.conftest import Run


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
