"""Environments of other tools, each in a folder of its own beside this project; `make interop` makes all of them.

    .venv/bin/python benchmarks/environments.py [--torch-index URL]

A tool never shares an environment with kvsearch: it asks for other versions of the same packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
KVPRESS, OPENVINO = ROOT / ".venv-kvpress", ROOT / ".venv-openvino"
# a press that is in no package: its file beside kvpress, which it asks for
PRESS = "efficient_defensivekv_press.py"
PRESS_SOURCE = (
    "https://raw.githubusercontent.com/FFY0/DefensiveKV/c278cd0e2e82b9889513ba19d20ee72652f23ad0/kvpress/presses/"
)
TOOLS = {
    KVPRESS: ("kvpress==0.5.5",),
    OPENVINO: ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
}


def ensure_environment(folder: Path, wanted: tuple[str, ...], torch_index: str | None = None) -> Path:
    """Return the Python of a virtual environment with the packages `wanted`, made if it is not there yet."""
    python = folder / "bin" / "python"
    pins = dict(one.split("==") for one in wanted)
    probe = f"from importlib.metadata import version; raise SystemExit(any(version(n) != v for n, v in {pins}.items()))"
    if python.exists() and subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0:
        return python
    print(f"installing {TORCH} and {', '.join(wanted)} into {folder} (once, some minutes)", file=sys.stderr)
    venv.create(folder, with_pip=True)
    index = [] if torch_index is None else ["--index-url", torch_index]
    # torch first, and named again: what the tools ask for is met by it, and not by a build that brings CUDA along
    for packages in ([TORCH, *index], [TORCH, *wanted]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-index", help="where torch is taken from, for builds without CUDA")
    for folder, wanted in TOOLS.items():
        ensure_environment(folder, wanted, parser.parse_args().torch_index)
    if not (KVPRESS / PRESS).exists():
        urllib.request.urlretrieve(PRESS_SOURCE + PRESS, KVPRESS / PRESS)
