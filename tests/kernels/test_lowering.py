"""The kernels compile to machine code: what the interpreter runs need not be what a GPU takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from tests.docs.test_links import DOCS
from tests.kernels.lowering import COMMON, TYPES

CONSUMER = 99 * 1024  # bytes of shared memory that a block has on GPUs of compute capability 8.6, 8.9 and 12.0
ARCHITECTURES = (80, 89, 90)
KERNELS = {"attend_chunks", "merge_chunks", "normalise_rows", "add_columns", "find_peaks", "finish_step"}
WIDE = ("attend_chunks", 90, "bf16", 128)  # 64 rows: see `BlockSizes.of`
PAGE = DOCS / "kernels.md"


def compiled(*options: str) -> list[dict[str, Any]]:
    """What every launch takes on every architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.lowering", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def page(found: list[dict[str, Any]]) -> str:
    """The documentation's page, with the most that a launch of a kernel takes."""
    head, rule, _ = PAGE.read_text(encoding="utf-8").partition("|---|---|---|---|---|---|\n")
    return re.sub(r"Triton [\d.]+\d", f"Triton {version('triton')}", head) + rule + "\n".join(rows(found)) + "\n"


def rows(found: list[dict[str, Any]]) -> list[str]:
    """The lines of its table, one for each kernel and each of the common pairs of type and head size."""
    types = {(TYPES[dtype], dim) for dtype, dim in COMMON}
    lines = []
    for kernel, dtype, dim in sorted({(each["kernel"], each["dtype"], each["dim"]) for each in found}):
        if (dtype, dim) not in types:
            continue
        row = f"| `{kernel}` | {dtype} | {dim} |"
        for architecture in ARCHITECTURES:
            alike = kernel, dtype, dim, architecture
            here = [each for each in found if (each["kernel"], each["dtype"], each["dim"], each["arch"]) == alike]
            shared, *others = (max(each[name] for each in here) for name in ("shared", "registers", "spilled"))
            row += f" {shared / 1024:.1f} KiB, {others[0]}, {others[1]} |"
        lines.append(row)
    return lines


@pytest.mark.slow
@pytest.mark.nightly
def test_every_launch_compiles_and_fits_a_gpu() -> None:
    found = compiled()
    assert {(each["kernel"], each["arch"]) for each in found} == {(k, a) for k in KERNELS for a in ARCHITECTURES}
    assert not [each for each in found if each["spilled"]]
    assert not [each for each in found if each["kernel"] == "add_columns" and each["reductions"]]
    wide = [each for each in found if each["shared"] > CONSUMER]
    assert {(each["kernel"], each["arch"], each["dtype"], each["dim"]) for each in wide} <= {WIDE}
    written = PAGE.read_text(encoding="utf-8")
    assert f"Triton {version('triton')}" not in written or set(rows(found)) <= set(written.splitlines())


if __name__ == "__main__":
    PAGE.write_text(page(compiled()), encoding="utf-8")
