"""docs/gpu.md is what benchmarks/gpu/tables.py makes of the results that are there, and the parts run without a GPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_links import DOCS
from tests.torture.device.build import NoCompiler, library

FOLDER = DOCS.parent / "benchmarks" / "gpu"
SCRIPTS = ("correctness", "kernel_speed", "decoding", "long_context")
ABSENT = {"kernel_speed-flashinfer"}  # where there is no GPU
# a script whose steps are not processes of their own, each of which would import all there is
HERE = f"""
import runpy, sys, traceback
sys.path[:0] = [{str(FOLDER)!r}, {str(DOCS.parent)!r}]
import steps
apart = steps.run
def run(command, limit):
    if command[1] != script:
        return apart(command, limit)
    sys.argv = command[1:]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        return 1, traceback.format_exc()
    return 0, ""
script, steps.run = sys.argv[1], run
sys.argv = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(FOLDER)
    return runpy.run_path(str(FOLDER / "tables.py"))


@pytest.mark.slow
def test_the_page_is_made_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tables(monkeypatch)
    written = (DOCS / "gpu.md").read_text(encoding="utf-8")
    assert written == made["page"](made["results"](made["RESULTS"])), "run python benchmarks/gpu/tables.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_every_part_runs_in_small_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        library()
        device = "fakegpu:0"
    except NoCompiler:
        device = "cpu"
    for script in SCRIPTS:
        words = (str(FOLDER / f"{script}.py"), "--small", "--device", device, "--out", str(tmp_path))
        subprocess.run([sys.executable, "-c", HERE, *words], check=True, cwd=tmp_path)
    made = tables(monkeypatch)
    found = made["results"](tmp_path)
    failed = {name: each["failed"] for name, each in found.items() if isinstance(each, dict) and "failed" in each}
    assert set(failed) == ABSENT, json.dumps(failed, indent=1)
    page = made["page"](found)
    for name in found:
        assert name.removesuffix("-versions") in page
    errors = [row for row in found["correctness-attention"] if row["dtype"] == "float32"]
    assert max(row["flat"] for row in errors) < 1e-5
    assert all(row["error"] < 1e-5 for row in found["correctness-rules"])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_step_that_takes_too_long_is_passed_over(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom steps import Step, main\n"
        "main(None, 1, {'slow': Step(lambda where: time.sleep(600), 1), 'wrong': Step(lambda where: 1 / 0, 60)})\n"
    )
    command = [sys.executable, str(script), "--small", "--device", "cpu", "--out", str(tmp_path)]
    paths = {"PYTHONPATH": f"{FOLDER}:{DOCS.parent}", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, env=paths)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert "it took more than 5 s" in found["script-slow"]["failed"]
    assert "ZeroDivisionError" in found["script-wrong"]["failed"]
    assert found["script-versions"]["device"] == "cpu"
