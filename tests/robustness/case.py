"""One mutated file: read it under limits, and say whether it was taken, refused as it should be, or neither.

A file is refused with a `KvsearchError` that names it, on one line, as it is printed, or with a list of indented ones.
One that is taken is valid: see `tests.robustness.kinds` for what that means of each. All else is a failure, and so is
whatever takes more than `SECONDS` of the processor, or more than `MEMORY` bytes beyond what the process had.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import process_time
from types import FrameType
from typing import Literal, NamedTuple

from kvsearch.core.errors import InternalError, KvsearchError
from kvsearch.core.printed import truncate_lines
from tests.robustness.kinds import Kind

SECONDS = 2.0
MEMORY = 500 * 2**20
# what stands for the file in messages about what is in it
NAMES = (
    "this profile",
    "this 'lukv' profile",
    "policy ",
    "task ",
    "qa_1",
    "qa_2",
    "narrativeqa",
    "passkey",
    "gsm8k",
    "entries per",
    "LlamaForCausalLM",
    "target ",  # of an export, which may need more than a profile has
)
LONGEST = 50_000  # letters of a message
Verdict = Literal["accepted", "refused", "failed"]


class Outcome(NamedTuple):
    """What became of a file; `problem` says why it failed, or how it was refused."""

    verdict: Verdict
    seconds: float
    problem: str = ""


class TooSlow(BaseException):
    """A reader has used all the time it may; no `except Exception` holds it."""


@dataclass(frozen=True)
class Case:
    """A file that follows from the kind and a number."""

    kind: Kind
    seed: int

    @property
    def data(self) -> bytes:
        """The mutated file."""
        rng = Random(f"{self.kind.name}/{self.seed}")
        bases = self.kind.bases()
        data = self.kind.form.mutated(rng.choice(bases), rng)
        while rng.random() < 0.1:
            data = self.kind.form.mutated(data, rng) if data in bases else _again(self.kind, data, rng)
        return data


def _again(kind: Kind, data: bytes, rng: Random) -> bytes:
    """Change a file once more; what is no longer of its format is left as it is."""
    with suppress(Exception):
        return kind.form.mutated(data, rng)
    return data


def run(kind: Kind, data: bytes, folder: Path, seconds: float = SECONDS) -> Outcome:
    """Read a file as the commands do that take one of this kind; the first time with more `seconds`, for imports."""
    path = folder / kind.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    started = process_time()
    try:
        with warnings.catch_warnings(), _within(seconds):
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", RuntimeWarning)  # numbers that overflow in what was taken for valid
            kind.check(path)
    except InternalError as error:
        return Outcome("failed", process_time() - started, f"InternalError: {error}")
    except KvsearchError as error:
        problem = wrong_with(truncate_lines(str(error)), path)
        spent = process_time() - started
        return Outcome("failed", spent, problem) if problem else Outcome("refused", spent, str(error))
    except (Exception, TooSlow, SystemExit) as error:
        return Outcome("failed", process_time() - started, f"{_place(error)}: {str(error)[:300]}")
    finally:
        kind.forget()
    return Outcome("accepted", process_time() - started)


def _place(error: BaseException) -> str:
    """Return what went wrong, and where in kvsearch."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "/kvsearch/" in one.filename] or frames
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"


def wrong_with(message: str, path: Path) -> str:
    """Say what is wrong with the message of a refusal; nothing if it is as it should be."""
    named = (path.name, path.stem, str(path.parent), *NAMES)
    if not any(name in message for name in named):
        return f"the message does not name the file: {message[:300]!r}"
    lines = message.split("\n")
    if any(not line.startswith("  ") for line in lines[1:]):
        return f"the message has lines that are none of a list: {message[:300]!r}"
    if len(message) > LONGEST:
        return f"the message has {len(message)} letters: {message[:300]!r}"
    return ""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in what takes more seconds of the processor: other processes do not count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def limited_memory(extra: int = MEMORY) -> Iterator[None]:
    """Let what runs inside have no more than `extra` bytes of address space beyond what the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
