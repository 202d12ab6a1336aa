"""The kernels compile to machine code: what the interpreter runs need not be what a GPU takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONSUMER = 99 * 1024  # bytes of shared memory that a block has on GPUs of compute capability 8.6, 8.9 and 12.0
KERNELS = {"attend_chunks", "merge_chunks", "normalise_rows", "add_columns", "spread_row", "finish_step"}


@pytest.mark.slow
@pytest.mark.nightly
def test_every_launch_compiles_and_fits_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.lowering"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {each["kernel"] for each in found} == KERNELS
    assert {each["arch"] for each in found} == {80, 90}
    assert all(each["shared"] <= CONSUMER and each["bytes"] for each in found)
