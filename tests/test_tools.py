"""Benchmarks and scripts can be imported: no name that they take from the package is gone."""

from __future__ import annotations

import runpy
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
