"""scripts/shape.py counts a package small enough to count by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
