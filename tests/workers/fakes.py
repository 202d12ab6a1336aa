"""An evaluator without a model: values follow from the candidate, and special first budgets make it fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.search.trials import Tables

AGES = 36_000  # seconds, more than any test takes on any machine
ROOM = 4  # candidates that fit into memory together
TOKENS = 10  # per candidate
SAMPLES = 3
NO_MEMORY, BROKEN, NAN, INFINITE, WRONG, SLOW, DEADLY, DEADLY_ONCE = range(901, 909)


def table(first: int = 8, second: int = 8) -> Ints:
    """A candidate [2, 1]."""
    return np.array([[first], [second]], dtype=np.int64)


def value_of(candidate: Ints, sample: int) -> float:
    """A number that shows which candidate and sample it belongs to, and that float32 would not keep."""
    return float(candidate[0, 0]) / 3 + float(candidate[1, 0]) * 100 + sample / 7


class Fake:
    """Writes its process id into `folder`, and what it was asked to do."""

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        self.tokens_spent, self.closed = 0, False
        self._folder, self._delay = folder, delay
        (folder / f"pid-{os.getpid()}").touch()

    def evaluate(self, job: Tables) -> Floats:
        """Values of the candidates on all samples."""
        time.sleep(self._delay)
        self.tokens_spent += TOKENS * len(job)
        self._fail({int(candidate[0, 0]) for candidate in job}, len(job))
        values = np.array([[value_of(candidate, sample) for sample in range(SAMPLES)] for candidate in job])
        for row, candidate in zip(values, job, strict=True):
            if candidate[0, 0] in (NAN, INFINITE):
                row[-1] = np.nan if candidate[0, 0] == NAN else np.inf
        return values

    def close(self) -> None:
        """Leave a mark."""
        self.closed = True
        (self._folder / f"closed-{os.getpid()}").touch()

    def _fail(self, firsts: set[int], candidates: int) -> None:
        if NO_MEMORY in firsts:
            raise MemoryError
        if candidates > ROOM:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 MiB free")
        if BROKEN in firsts:
            raise ValueError("first line\nsecond   line")
        if WRONG in firsts:
            raise UsageError("sample 7 has no answer: leave it out")
        if SLOW in firsts:
            time.sleep(AGES)
        marker = self._folder / "died"
        if DEADLY in firsts or (DEADLY_ONCE in firsts and not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def build(folder: Path, delay: float = 0.0) -> Fake:
    """For workers."""
    return Fake(folder, delay)


def refuse() -> Fake:
    """An evaluator that cannot be built, for a reason that kvsearch knows."""
    raise EnvironmentFault("there is no model")


def stumble() -> Fake:
    """An evaluator that cannot be built."""
    raise KeyError("weights")
