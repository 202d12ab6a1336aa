"""One command in a process of its own, and what it left: stopped by a fault, given again, compared byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from kvsearch.plan.temporary import TEMPORARY
from tests.robustness.crash.faults import KILLED, Faults, Kind, injected

PATIENCE = 120  # seconds that a command may take
NOW = 1_000_000.0
BUG = 1  # the exit code of an error that kvsearch did not foresee
FAULT = 3  # that of a machine at fault
Tree = dict[str, str]


@dataclass(frozen=True)
class Command:
    """A command that writes into the folder it runs in; `again` is how to go on, where that is not the same.

    `inputs` are copied there before, and must be as they were after a fault, but for those named in `replaces`.
    """

    name: str
    words: tuple[str, ...]
    inputs: Path
    again: tuple[str, ...] | None = None
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it said on standard error, and its operations and forward passes."""

    code: int
    talk: str
    operations: tuple[str, ...]
    passes: int


def run_in(folder: Path, words: Sequence[str], kind: Kind = "kill", at: int = 0) -> Ended:
    """Run a command in a forked process, with a fault; time stands still, so that equal runs write equal bytes."""
    told, talk = folder.with_suffix(".json"), folder.with_suffix(".talk")
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(folder, words, Faults(folder, kind, at), told, talk)
    status = _wait(child)
    counts = json.loads(told.read_text()) if told.exists() else {"names": [], "passes": 0}
    return Ended(status, talk.read_text(errors="replace"), tuple(counts["names"]), counts["passes"])


def _child(folder: Path, words: Sequence[str], faults: Faults, told: Path, talk: Path) -> None:
    """Be the command; never returns."""
    code = BUG
    try:
        os.chdir(folder)
        quiet = os.open(talk, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="replace") for number in (1, 2))
        sys.argv = ["kvsearch", *words]
        with _no_time():
            code = _command(words, faults)
        told.write_text(json.dumps({"names": faults.names, "passes": faults.passes}))
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


@contextmanager
def _no_time() -> Iterator[None]:
    """Let time stand still, for modules that have taken a clock for themselves, too."""
    clocks = ("perf_counter", "monotonic", "time")
    with ExitStack() as stack:
        for module in [*(one for name, one in sys.modules.items() if name.startswith("kvsearch.")), time]:
            for clock in clocks:
                if getattr(module, clock, None) is getattr(time, clock) or module is time:
                    stack.enter_context(mock.patch.object(module, clock, lambda: NOW))
        yield


def _command(words: Sequence[str], faults: Faults) -> int:
    from kvsearch.cli import app

    try:
        with injected(faults):
            app(list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else BUG
    return 0


def _wait(child: int) -> int:
    for _ in range(PATIENCE * 50):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def tree_of(folder: Path) -> Tree:
    """Return the digest of every file in a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prepared(command: Command, folder: Path) -> Path:
    """Return a new folder with the inputs of a command."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(command.inputs, folder)
    return folder


def undisturbed(command: Command, folder: Path) -> tuple[Ended, Tree]:
    """Run a command without a fault; RuntimeError if it fails."""
    ended = run_in(prepared(command, folder), command.words)
    if ended.code:
        raise RuntimeError(f"{command.name} fails by itself with {ended.code}: {ended.talk}")
    return ended, tree_of(folder)


def problem_of(command: Command, wanted: Tree, folder: Path, kind: Kind, at: int) -> str | None:
    """Return what is wrong after a fault and after the command was given again; None if nothing is."""
    prepared(command, folder)
    before = tree_of(folder)
    stopped = run_in(folder, command.words, kind, at)
    after = tree_of(folder)
    if (problem := _badly_stopped(stopped, kind)) is not None:
        return problem
    lost = [name for name, digest in before.items() if after.get(name) != digest and name not in command.replaces]
    if lost:
        return f"lost or changed {lost}"
    halves = [name for name in command.replaces if after.get(name) not in (before.get(name), wanted.get(name))]
    if halves:
        return f"neither the old nor the new content of {halves}"
    if after == wanted:
        return None  # the last thing that failed was not needed
    if stopped.code == 0 and kind == "memory":  # it went on with smaller batches, which decide last bits
        return f"left behind {left}" if (left := _temporary(after)) else None
    ended = run_in(folder, command.again if stopped.code and command.again else command.words)
    if ended.code:
        return f"given again it ends with {ended.code}: {_last(ended.talk)}"
    found = tree_of(folder)
    if left := _temporary(found):
        return f"left behind {left}"
    if found != wanted:
        other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        return f"given again it writes something else: {other}"
    return None


def _temporary(tree: Tree) -> list[str]:
    return [name for name in tree if TEMPORARY in name]


def _badly_stopped(ended: Ended, kind: Kind) -> str | None:
    if kind == "kill":
        return None if ended.code in (0, KILLED) else f"ends with {ended.code}: {_last(ended.talk)}"
    errors = [line for line in ended.talk.splitlines() if line.startswith("kvsearch: error")]
    if ended.code == 0 and not errors:
        return None  # what failed was not needed, such as the sync of a folder, or was tried again with less
    if ended.code != FAULT or len(errors) != 1 or "Traceback" in ended.talk:
        return f"ends with {ended.code}: {_last(ended.talk)}"
    return None


def _last(talk: str) -> str:
    lines = talk.strip().splitlines()
    return lines[-1] if lines else "nothing is said"
