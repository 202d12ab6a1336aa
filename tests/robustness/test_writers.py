"""Writers that are stopped, and writers that meet: a few; `make crash` and `make races` try all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIED = """
import sys
from tests.robustness import races
from tests.robustness.crash import __main__ as crash
failed = crash.main("--only evaluate --every 90 --jobs 1".split())
sys.exit(failed or races.main("--only evaluate --races 2".split()))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_writers() -> None:
    """In a process of their own, which holds a model for all commands and forks."""
    done = subprocess.run(
        [sys.executable, "-c", TRIED], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    for title, (_, *counts) in zip(("points", "races"), (rows[1], rows[3]), strict=True):
        assert sum(map(int, counts)) > 0, title
