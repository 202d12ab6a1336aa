"""What is made once for all processes of a test run: each of them gets a copy of its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Finished(NamedTuple):
    """A copy of a folder in which a command was run, and what the command said, with the copy's name."""

    folder: Path
    out: str
    talk: str


def folder_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of this name, which one process has filled for all: nobody writes there any more."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / f"shared-{name}"
    filled = base / f"shared-{name}.filled"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed there
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder


def finished_once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], tuple[int, str, str]]) -> Finished:
    """Return a copy of the folder in which `run` has run a command, for all processes once."""

    def fill(folder: Path) -> None:
        code, out, talk = run(folder)
        assert code == 0, talk
        folder.with_suffix(".said").write_text(json.dumps([out, talk]))

    made = folder_once(factory, name, fill)
    copy = factory.mktemp(name) / "copy"
    shutil.copytree(made, copy)
    out, talk = json.loads(made.with_suffix(".said").read_text())
    return Finished(copy, out.replace(f"{made}/", f"{copy}/"), talk.replace(f"{made}/", f"{copy}/"))
