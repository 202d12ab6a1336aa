"""A search that goes on for an hour: `python -m tests.robustness.soak` (`make soak`).

Memory and open files of `kvsearch evolve` and all processes below it are sampled; what they come to at the end is
compared with what they came to once everything was loaded and every kind of candidate had been seen. A line for each
tenth of the time, and exit code 1 if the last one is above the third by more than 2%.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

TENTHS = 10
WARM = 2  # tenths that do not count: the ones before the third
GROWTH = 1.02
SEARCH = "--budget 64 --set window=8 --space layers --optimiser random --samples 4 --generations 1000000".split()


@dataclass(frozen=True)
class Sample:
    """What a command held at a moment: bytes of memory, and open files."""

    seconds: float
    memory: int
    files: int


@dataclass(frozen=True)
class Tenth:
    """What was held in a tenth of the time: bytes of memory and open files, as medians of the samples."""

    memory: float
    files: float


def samples(process: subprocess.Popen[bytes], every: float) -> Iterator[Sample]:
    """Yield what a command and the processes below it hold, until it ends."""
    root, began = psutil.Process(process.pid), time.monotonic()
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            family = [root, *root.children(recursive=True)]
            memory, files = sum(one.memory_info().rss for one in family), sum(one.num_fds() for one in family)
            yield Sample(time.monotonic() - began, memory, files)
        time.sleep(every)


def tenths(taken: Sequence[Sample]) -> list[Tenth]:
    """Return the medians of equal parts of the time; ValueError for a part without a sample."""
    end = taken[-1].seconds if taken else 0.0
    parts: list[list[Sample]] = [[] for _ in range(TENTHS)]
    for one in taken:
        parts[min(int(TENTHS * one.seconds / end) if end else 0, TENTHS - 1)].append(one)
    if not all(parts):
        raise ValueError(f"{len(taken)} samples are too few: sample more often, or for longer")
    return [Tenth(median(one.memory for one in part), median(one.files for one in part)) for part in parts]


def growth(found: Sequence[Tenth]) -> Tenth:
    """Return how many times as much there is at the end as after the beginning."""
    first, last = found[WARM], found[-1]
    return Tenth(last.memory / first.memory, last.files / first.files)


def soak(seconds: float, every: float, folder: Path) -> list[Sample]:
    """Search on the bundled model for so long; RuntimeError if the search does not end well."""
    words = ("evolve", "bundled", *SEARCH, "--max-time", f"{seconds:g}", "-o", str(folder / "run"))
    log = folder / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "kvsearch", *words]
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            taken = list(samples(process, every))
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the search ended with exit code {process.returncode}:\n{log.read_text()[-2000:]}")
    return taken


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if memory or open files grew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from sample to sample")
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        taken = soak(given.seconds, given.every, Path(folder))
        ledger = Path(folder) / "run" / "ledger.jsonl"
        lines = len(ledger.read_bytes().splitlines())
    found, say = tenths(taken), sys.stdout.write
    say(f"{len(taken)} samples, {lines} lines in the ledger\n{'tenth':>5} {'memory MB':>10} {'open files':>11}\n")
    for number, tenth in enumerate(found, 1):
        say(f"{number:>5} {tenth.memory / 1e6:>10.1f} {tenth.files:>11g}\n")
    grown = growth(found)
    say(f"the last against the third: memory {grown.memory:.4f}, open files {grown.files:.4f} (allowed {GROWTH})\n")
    return int(max(grown.memory, grown.files) > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
