"""Commands in processes of their own, on the bundled model, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvsearch.runs.identity import SUMS
from kvsearch.runs.lock import LOCK
from scripts.golden import compare
from tests import tiny

ROOT = Path(__file__).parents[2]
TASKS = "bundled --tasks jsonl:tasks.jsonl"
COMMANDS = {
    "run": f"run {TASKS} --policies snapkv --rankings query_bank --fit 4 --measure 2 --samples 4 --budget 40 "
           "--evaluations 6",
    "evolve": f"evolve {TASKS} --budget 12 --set window=4 --group-size 2 --generations 2 --population 4 --finalists 2 "
              "--samples 3",
    "evaluate": f"evaluate {TASKS} --methods tova,knorm --budgets 24 --samples 6 --batch 1",
}  # fmt: skip


def start(folder: Path, words: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """Begin a command whose results go to `out` in the folder; `before` is called in the new process."""
    if not folder.exists():
        folder.mkdir()
        tiny.task_file(folder / "tasks.jsonl", 40, length=100, facts=3)
    command = [sys.executable, "-m", "kvsearch", *words.split(), "-o", "out"]
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=own, preexec_fn=before, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a command; return its exit code and what it said."""
    _, talk = process.communicate(timeout=600)
    return process.returncode, talk


def finish(folder: Path, words: str) -> Path:
    """Run a command to its end, and return the directory of its results."""
    code, talk = end(start(folder, words))
    assert code == 0, talk
    return folder / "out"


def find_differences(expected: Path, found: Path) -> list[str]:
    """Return in which files two directories differ, beyond seconds; checksums cover these, too."""
    names = {
        path.relative_to(place).as_posix()
        for place in (expected, found)
        for path in place.rglob("*")
        if path.is_file() and path.name not in (SUMS, LOCK)
    }
    verdicts = {name: compare(f"runs/out/{name}", expected / name, found / name) for name in sorted(names)}
    return [f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict not in ("same", "ignored")]
