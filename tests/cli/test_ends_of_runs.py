"""How runs end: what cannot be done leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.cli.console import BUG
from tests.cli.conftest import Run
from tests.cli.test_bad_input import INCOMPATIBLE, USAGE
from tests.robustness.inputs import calibration_file


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_file(tmp_path_factory.mktemp("texts") / "texts.json", 4)


def calibration(texts: Path, directory: Path, *more: object) -> tuple[object, ...]:
    return ("calibrate", "bundled", "--data", texts, "-o", directory, *(more or ("--method", "query_statistics")))


# --- what cannot be done leaves nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lukv", "lava", "polykv", "probe"])
def test_texts_that_do_not_suit_the_model(run: Run, tmp_path: Path, method: str) -> None:
    """Found out before anything is measured, or while it is: the directory, and those above it, go again."""
    short = calibration_file(tmp_path / "texts.json", 1, length=12)
    code, _, talk = run("calibrate", "bundled", "--method", method, "--data", short, "-o", tmp_path / "deep" / "run")
    assert code in (USAGE, INCOMPATIBLE), talk
    assert not (tmp_path / "deep").exists()


def test_a_bug_is_no_request_that_cannot_be_done(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun stays, and can be looked at."""

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("kvsearch.jobs.calibrate._checked_table", broken)
    assert run(*calibration(texts, tmp_path / "run"))[0] == BUG
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
