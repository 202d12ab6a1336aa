"""Build the fake accelerator with the compiler that is there, once for every source and version of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared")  # its kernels are torch's own


class NoCompiler(Exception):
    """There is no C++ compiler, or it cannot build against this torch."""


def cache_folder() -> Path:
    """Where built libraries are kept, outside the tree."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvsearch-tests"


def library() -> Path:
    """Return the built library; NoCompiler, with the reason, if that cannot be."""
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler("the fake accelerator is built with g++ or clang++, and there is none")
    built_from = repr((SOURCE.read_bytes(), FLAGS, torch.__version__, compiler))
    path = cache_folder() / f"device-{hashlib.sha256(built_from.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # others may build at the same time
            made = Path(folder) / path.name
            _compile(compiler, made)
            made.replace(path)
    return path


def _compile(compiler: str, made: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include/torch/csrc/api/include")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [compiler, *FLAGS, abi, *(f"-I{path}" for path in headers), str(SOURCE), "-o", str(made)]
    done = subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"], capture_output=True, text=True)
    if done.returncode:
        raise NoCompiler(f"{compiler} cannot build the fake accelerator: {done.stderr.strip()[:500]}")
