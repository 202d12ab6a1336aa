"""How runs end: finished ones say so when they are asked for again, and one whose directory goes ends at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsearch.cli.console import BUG
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.models.loading import load
from kvsearch.runs.ledger import Ledger
from tests import tiny
from tests.cli.conftest import Run
from tests.cli.test_bad_input import ENVIRONMENT, INCOMPATIBLE, USAGE, refused
from tests.robustness.inputs import calibration_file
from tests.signals.profiles import make_signals, signal_metadata

FINISHED = "this run was finished: nothing was left to do\n"
REMOVED = "was removed or replaced while this command was writing there"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", 12, length=100, facts=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_file(tmp_path_factory.mktemp("texts") / "texts.json", 4)


@pytest.fixture(scope="module")
def profile() -> bytes:
    patterns: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}}
    return make_signals(signal_metadata(load("bundled").fingerprint, patterns, budgets=(24,))).to_bytes()


def calibration(texts: Path, directory: Path, *more: object) -> tuple[object, ...]:
    return ("calibrate", "bundled", "--data", texts, "-o", directory, *(more or ("--method", "query_statistics")))


def evaluation(questions: Path, directory: Path, *more: object) -> tuple[object, ...]:
    asked = ("--tasks", f"jsonl:{questions}", "--budgets", 24, "--samples", 2)
    return ("evaluate", "bundled", *asked, "-o", directory, *more)


def validation(questions: Path, directory: Path, *more: object) -> tuple[object, ...]:
    asked = ("--tasks", f"jsonl:{questions}", "--samples", 2, "--phases", "prefill", "--signals", "cosine")
    return ("validate", directory, *asked, *more)


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- finished ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lava", "query_statistics"])
def test_a_finished_calibration(
    run: Run, texts: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = calibration(texts, tmp_path / "run", "--method", method)
    code, out, talk = run(*command, "--json")
    assert (code, FINISHED in talk) == (0, False), talk
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("kvsearch.models.loading.load", lambda *_: pytest.fail("a model is loaded"))
        code, again, talk = run(*command, "--json")
        assert (code, again) == (0, out)
        assert talk.startswith(FINISHED)
        for other in (("--questions", 3), ("--dtype", "bfloat16"), ("--seed", 1)):
            refused(run, USAGE, "run holds another calibration: ", *command, *other)
    code, _, talk = run(*command, "--dry-run")
    assert (code, FINISHED in talk) == (0, True)
    assert files(tmp_path) == before
    (tmp_path / "run" / "contexts.json").unlink()  # killed between the last two files
    assert run(*command)[0] == 0
    assert files(tmp_path) == before


def test_a_finished_evaluation(run: Run, questions: Path, tmp_path: Path) -> None:
    command = evaluation(questions, tmp_path / "run", "--methods", "tova")
    code, out, talk = run(*command)
    assert (code, FINISHED in talk) == (0, False), talk
    before = files(tmp_path)
    code, again, talk = run(*command)
    assert (code, again, FINISHED in talk) == (0, out, True)
    for other in ("--methods", "streaming"), ("--methods", "tova", "--seed", 1):
        refused(run, USAGE, "run holds another run: ", *evaluation(questions, tmp_path / "run", *other))
    assert files(tmp_path) == before


def test_a_finished_validation(run: Run, questions: Path, tmp_path: Path, profile: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile.safetensors").write_bytes(profile)
    (tmp_path / "run" / "config.json").write_text('{"model": "bundled"}')
    command = validation(questions, tmp_path / "run")
    code, out, talk = run(*command)
    assert (code, FINISHED in talk) == (0, False), talk
    before = files(tmp_path)
    code, again, talk = run(*command)
    assert (code, again, FINISHED in talk) == (0, out, True)
    refused(run, USAGE, "is about other questions or another profile: ", *command, "--seed", 1)
    assert files(tmp_path) == before


# --- a directory that goes under a command ----------------------------------------------------------------------------


def going(directory: Path, function: Callable[..., Any], calls: int = 1) -> Callable[..., Any]:
    """Return a function that is called after the directory was removed, at its call of this number."""
    left = [calls]

    def called(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            shutil.rmtree(directory)
        return function(*arguments, **keywords)

    return called


def test_an_evaluation_ends_at_its_next_reply(
    run: Run, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()
    append = going(tmp_path / "run", Ledger._append, 2)

    def appending(*arguments: object) -> None:
        asked.append(arguments)
        append(*arguments)

    monkeypatch.setattr(Ledger, "_append", appending)
    command = evaluation(questions, tmp_path / "run", "--methods", "tova", "--batch", 1, "--samples", 6)
    told = refused(run, ENVIRONMENT, REMOVED, *command)
    assert told.endswith("give the same command again to begin anew\n")
    assert told.count("\n") == 1
    assert len(asked) == 2
    assert not (tmp_path / "run").exists()


def test_a_calibration_ends(run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvsearch.jobs.calibrate as jobs

    monkeypatch.setattr(jobs, "_checked_table", going(tmp_path / "run", jobs._checked_table))
    refused(run, ENVIRONMENT, REMOVED, *calibration(texts, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_steps_of_a_calibration_do_not_make_its_directory_again(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvsearch.calibration.steps as steps

    monkeypatch.setattr(steps, "write_arrays", going(tmp_path / "run", steps.write_arrays))
    command = calibration(texts, tmp_path / "run", "--method", "query_bank", "--answers", "given")
    refused(run, ENVIRONMENT, REMOVED, *command)
    assert not (tmp_path / "run").exists()


def test_a_validation_ends(
    run: Run, questions: Path, tmp_path: Path, profile: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile.safetensors").write_bytes(profile)
    (tmp_path / "run" / "config.json").write_text('{"model": "bundled"}')
    monkeypatch.setattr(ReplyStore, "__init__", going(tmp_path / "run", ReplyStore.__init__))
    refused(run, ENVIRONMENT, REMOVED, *validation(questions, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# --- what cannot be done leaves nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lukv", "lava", "polykv", "probe"])
def test_texts_that_do_not_suit_the_model(run: Run, tmp_path: Path, method: str) -> None:
    """Found out before anything is measured, or while it is: the directory, and those above it, go again."""
    short = calibration_file(tmp_path / "texts.json", 1, length=12)
    code, _, talk = run("calibrate", "bundled", "--method", method, "--data", short, "-o", tmp_path / "deep" / "run")
    assert code in (USAGE, INCOMPATIBLE), talk
    assert not (tmp_path / "deep").exists()


def test_a_directory_that_was_there_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    short = calibration_file(tmp_path / "texts.json", 1, length=12)
    assert run(*calibration(short, tmp_path / "run", "--method", "lukv"))[0] in (USAGE, INCOMPATIBLE)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_bug_is_no_request_that_cannot_be_done(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun stays, and can be looked at."""

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("kvsearch.jobs.calibrate._checked_table", broken)
    assert run(*calibration(texts, tmp_path / "run"))[0] == BUG
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
