"""The tests of the folder device, in a process that has the fake accelerator from its beginning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "device"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="the folder device is collected itself")
def test_on_device(pytestconfig: pytest.Config) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", pytestconfig.getoption("markexpr")]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    ended = subprocess.run(command, env=own, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
