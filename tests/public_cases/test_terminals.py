"""What a terminal, a pipe or a file system refuses: one line and the right exit code, after the results are safe."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsearch.cli import app, streams
from kvsearch.cli.console import LOGGER, set_up_log
from kvsearch.cli.streams import StandardOutput, guarded_streams
from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.plan.saved import save_plan
from tests import tiny
from tests.combinations import first_value

USAGE, ENVIRONMENT = UsageError.exit_code, EnvironmentFault.exit_code
NAME = "mod\u00e8le-\u6771\u4eac"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full here")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("terminals") / "plan.json"
    model = tiny.loaded()
    named = replace(model, fingerprint=model.fingerprint.model_copy(update={"name": NAME}))
    save_plan(tiny.plan_for(named, [[40, 40]] * 4), path)
    return path


@needs_full
def test_an_error_of_standard_output_is_told_once() -> None:
    """What follows is not refused again, when the process ends."""
    full = StandardOutput(FULL.open("w"))
    full.write("a")
    with pytest.raises(OSError, match="standard output"):
        full.flush()
    full.write("b")
    full.flush()


@needs_full
def test_a_log_on_a_full_disk_ends_and_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvsearch.cli.console.check_target", lambda _: None)
    try:
        set_up_log(False, FULL)
        LOGGER.info("one")
        LOGGER.info("two")
    finally:
        set_up_log(False, None)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line]
    assert warnings == [f"kvsearch: warning: the log {FULL} ends here: [Errno 28] {os.strerror(errno.ENOSPC)}"]
    assert logging.raiseExceptions


# --- names of files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "show {0}", "report {0} -o {0}", "show {1} --log-file {0}", "compress bundled --plan {1} -o {0}",
        "plan uniform bundled --ratio 0.5 --length 200 --policy snapkv -o {0}", "generate bundled --context @{0}",
        "calibrate bundled -o {0}", "evaluate bundled --tasks jsonl:{0}", "generate {0}",
        "evaluate bundled --methods uniform:streaming --budgets 64 --samples 2 -o {0}", "evolve bundled --recipe {0}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["too long", "a link to itself"])
def test_every_command_refuses_them(words: str, kind: str, plan: Path, tmp_path: Path) -> None:
    name = tmp_path / ("a" * 300 if kind == "too long" else "loop")
    if kind != "too long":
        name.symlink_to(name)
    done = CliRunner().invoke(app, words.format(name, plan).split())
    assert done.exit_code == USAGE, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("kvsearch: error: ")]) == 1


# --- whole processes --------------------------------------------------------------------------------------------------


def kvsearch(words: str, plan: Path, **environment: str) -> tuple[int, bytes]:
    """Exit code and all output of a shell command in which K is the command."""
    command = f"{sys.executable} -m kvsearch"
    script = words.replace("PLAN", str(plan)).replace("K ", f"{command} ")
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )
    return done.returncode, done.stdout + done.stderr


USUAL = [
    ("K show PLAN --json | true; exit ${PIPESTATUS[0]}", 0, b""),
    ("K show PLAN >&- 2>&-", 0, b""),
    ("K show nowhere 2>/dev/full", USAGE, b""),
    ("K show PLAN >/dev/full", ENVIRONMENT, b"standard output"),
    ("K show -h >/dev/full", ENVIRONMENT, b"standard output"),
    ("PYTHONIOENCODING=ascii K show PLAN", 0, rb"mod\xe8le-\u6771\u4eac"),
]
OTHERS = [
    ("K show PLAN | head -1; exit ${PIPESTATUS[0]}", 0, b"model"),
    ("K -h | true; exit ${PIPESTATUS[0]}", 0, b""),
    ("K show PLAN >&-", 0, b""),
    ("K show nowhere 2>&-", USAGE, b""),
    ("K show nowhere 2>&1 | true; exit ${PIPESTATUS[0]}", USAGE, b""),
    ("K show PLAN --json >/dev/full", ENVIRONMENT, b"standard output"),
    ("K --version >/dev/full", ENVIRONMENT, b"standard output"),
    ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 K show PLAN", 0, rb"mod\xe8le-\u6771\u4eac"),
    ("PYTHONIOENCODING=ascii K show n\u00f6where", USAGE, rb"n\xf6where"),
    ("env -u HOME TMPDIR=/nowhere K show PLAN", 0, b"model"),
    ("COLUMNS=1 TERM=dumb K show PLAN", 0, b"model"),
]


@needs_full
@first_value(("words", "code", "said"), [*USUAL, *OTHERS], usual=len(USUAL))
def test_streams_of_a_process(words: str, code: int, said: bytes, plan: Path) -> None:
    found, output = kvsearch(words, plan)
    assert found == code, output
    assert said in output
    assert b"Traceback" not in output
    assert b"Exception ignored" not in output
    assert output.count(b"kvsearch: error: ") <= 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("streams_of_it", "code"),
    [(">/dev/full", ENVIRONMENT), ("2>&1 | true; exit ${PIPESTATUS[0]}", 0), (">&- 2>&-", 0)],
)
@needs_full
def test_results_are_safe_before_they_are_printed(streams_of_it: str, code: int, plan: Path, tmp_path: Path) -> None:
    asked = f"K evaluate bundled --methods uniform:streaming --budgets 64 --samples 2 -o {tmp_path}/run"
    found, output = kvsearch(f"{asked} {streams_of_it}", plan, PYTHONIOENCODING="ascii", HOME="/nowhere")
    assert found == code, output
    assert {"report.json", "samples.csv", "tables.md"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("known", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    variables = {"PATH": "here", **({known: "mine"} if known else {})}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(streams, "prepare_streams", lambda: None)
    wanted = dict(variables) if known else {**variables, "OMP_WAIT_POLICY": "passive"}
    with guarded_streams():
        assert variables == wanted
