"""Commands in processes that are forked from this one, which has the models and all modules; time stands still there.

So equal commands write equal bytes, and a command costs no more than its work.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from kvsearch.runs.identity import SUMS
from tests.robustness.operations import Watch, watched

NOW = 1_000_000.0
BUG = 1  # the exit code of an error that kvsearch did not foresee
PATIENCE = 120  # seconds of the processor that a command may take
Tree = dict[str, str]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it said on standard error, and its operations and forward passes."""

    code: int
    talk: str
    operations: tuple[str, ...] = ()
    passes: int = 0

    @property
    def last(self) -> str:
        """The last thing it said."""
        lines = self.talk.strip().splitlines()
        return lines[-1] if lines else "nothing is said"


@dataclass(frozen=True)
class Process:
    """A command at work."""

    number: int
    told: Path
    talk: Path

    def end(self) -> Ended:
        """Wait for it."""
        _, status = os.waitpid(self.number, 0)
        counts = json.loads(self.told.read_text()) if self.told.exists() else {"names": [], "passes": 0}
        talk = self.talk.read_text(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status), talk, tuple(counts["names"]), counts["passes"])


def start(watch: Watch, words: Sequence[str], name: str = "", before: Callable[[], object] = lambda: None) -> Process:
    """Begin a command in the folder that is watched, after `before`; what it says is kept beside the folder."""
    told, talk = (watch.folder.with_name(f"{watch.folder.name}{name}.{kind}") for kind in ("json", "talk"))
    for file in (told, talk):
        file.unlink(missing_ok=True)
    number = os.fork()
    if number == 0:
        _child(watch, words, told, talk, before)
    return Process(number, told, talk)


def run_in(folder: Path, words: Sequence[str]) -> Ended:
    """Run a command."""
    return start(Watch(folder), words).end()


def _child(watch: Watch, words: Sequence[str], told: Path, talk: Path, before: Callable[[], object]) -> None:
    """Be the command; never returns."""
    code = BUG
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
        os.chdir(watch.folder)
        quiet = os.open(talk, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="replace") for number in (1, 2))
        before()
        with timeless(), watched(watch):
            code = command(words)
        told.write_text(json.dumps({"names": watch.names, "passes": watch.passes}))
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


@contextmanager
def timeless() -> Iterator[None]:
    """Let time stand still, for modules that have taken a clock for themselves, too."""
    clocks = ("perf_counter", "monotonic", "time")
    with ExitStack() as stack:
        for module in [*(one for name, one in sys.modules.items() if name.startswith("kvsearch.")), time]:
            for clock in clocks:
                if getattr(module, clock, None) is getattr(time, clock) or module is time:
                    stack.enter_context(mock.patch.object(module, clock, lambda: NOW))
        yield


def command(words: Sequence[str]) -> int:
    """Run a command in this process, as if it had been typed."""
    from kvsearch.cli import app

    sys.argv = ["kvsearch", *words]
    try:
        app(list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else BUG
    return 0


def warm(folder: Path, words: Sequence[str]) -> None:
    """Run a command in this process: what it imports and makes once is there for all that are forked from now on."""
    with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        command(words)
    gc.collect()
    gc.freeze()  # else a forked process copies what it collects


def tree_of(folder: Path) -> Tree:
    """Return the digest of every file in a folder, by its path, wherever the folder is: some files say where."""
    place = str(folder.resolve()).encode()
    contents = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    tree = {}
    for path, content in contents.items():
        lines = content.splitlines(keepends=True)
        if path.name == SUMS:  # without the sums of files that say where they are
            files = [path.parent / line.split(maxsplit=1)[1].decode().rstrip() for line in lines]
            lines = [line for line, file in zip(lines, files, strict=True) if place not in contents.get(file, b"")]
        digest = hashlib.sha256(b"".join(lines).replace(place, b"FOLDER"))
        tree[str(path.relative_to(folder))] = digest.hexdigest()
    return tree


def hold_models() -> None:
    """Make the model of all commands once, whatever they call it, and import what they import."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    import kvsearch.models.loading as loading
    from kvsearch.cli.registry import VERBS
    from tests import tiny

    held = tiny.loaded(num_hidden_layers=2)
    loading.load = loading.find_source = lambda *_, **__: held
    for verb in VERBS.values():
        verb.load_command()
