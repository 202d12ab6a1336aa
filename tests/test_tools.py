"""Scripts beside the package: they can be imported, and the shape of the code keeps its limits."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TOOLS = [
    path for folder in ("benchmarks", "benchmarks/gpu", "scripts") for path in sorted((ROOT / folder).glob("*.py"))
]


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_it_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path), run_name="imported")


def test_runs_of_the_report_benchmark_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_report.py", "--layers", "2", "--candidates", "8", "--keep", str(tmp_path)])
    bench = runpy.run_path(str(ROOT / "benchmarks" / "bench_report.py"))
    monkeypatch.setitem(bench["main"].__globals__, "timed", lambda command: 0.0)
    (tmp_path / "report.html").write_text("<figure>")
    bench["main"]()


SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "shape.py"
ROUND = "import pkg.turn\n"
# one helper has one caller, the other two; the import circle is closed inside a function
TURN = """def _once(value: int) -> int:
    return value


def _often() -> int:
    return _once(1)


def turn() -> int:
    import pkg.round

    return _often() + _often()
"""
GATED = """from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Pair(NamedTuple):
    left: int


class Plain:
    def say(self, some: bool) -> list[int]:
        \"\"\"See `Pair`.\"\"\"
        a, b = 1, 2
        c, d = self.say(some)
        return [a] * some + [b] * (c > d) + [c] * bool(d) + [d] * 2

    def refuse(self) -> None:
        import json

        raise UsageError(json)
"""


def test_figures_with_limits(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "jobs").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/jobs/__init__.py"):
        (tmp_path / name).write_text("")
    for name, text in (("jobs/one.py", GATED), ("round.py", ROUND), ("turn.py", TURN)):
        (tmp_path / "pkg" / name).write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("pass\n" * 11)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pkg"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1  # lists repeated by a condition and the circle are too many
    figures = [int(line[52:60].replace(",", "")) for line in done.stdout.splitlines()]
    assert figures == [21, 5, 1, 0, 0, 1, 1, 1, 2, 1, 1, 1, 11]


@pytest.mark.slow
def test_the_package_keeps_its_limits() -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True, stdout=subprocess.DEVNULL)
