"""Processes that read mutated files: one that dies or hangs has failed, and all others go on."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.robustness.case import Case, Outcome, limited_memory, run
from tests.robustness.kinds import KINDS

BLOCK = 250  # cases that a process does at a time
SILENCE = 60.0  # seconds of the processor that the first reading may take, with its imports
BLOCKED = 600.0  # seconds of the clock after which a process that is at one case is ended
OLD = 40  # blocks for each process, as old ones keep more; max_tasks_per_child hangs in Python 3.11 once all are old

Block = tuple[str, int, int]  # kind, first case, how many
Done = tuple[str, list[Outcome], int]


def cause(problem: str) -> str:
    """Return what a failure has in common with others: where it is, without what was in the file."""
    return re.sub(r"\d+", "#", problem.split(": ")[0])


def outcomes(blocks: list[Block], jobs: int, save: Path) -> Iterator[Done]:
    """Do blocks in processes of their own; where one of these dies, what was at work has failed and is left out."""
    waiting = dict.fromkeys(blocks)
    while waiting:
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)
        with TemporaryDirectory() as places, pool:
            futures = {pool.submit(_work, block, save, Path(places)): block for block in islice(waiting, OLD * jobs)}
            try:
                for future in as_completed(futures):
                    done = future.result()
                    del waiting[futures[future]]
                    yield done
            except BrokenProcessPool:
                for block in [block for block in waiting if _place(block, Path(places)).exists()]:
                    number = int(_place(block, Path(places)).read_text())
                    del waiting[block]
                    problem = "a process has ended here or in another case at this time"
                    _keep(save, block[0], number, problem)
                    yield block[0], [Outcome("failed", 0.0, problem)], 0


def _begin() -> None:
    """Make what mutated files are made of, once for every process."""
    sys.setrecursionlimit(1000)
    for kind in KINDS.values():
        kind.bases()


def _place(block: Block, places: Path) -> Path:
    """Return the file that has the case of a block which is at work."""
    return places / f"{block[0]}-{block[1]}"


def _work(block: Block, save: Path, places: Path) -> Done:
    """Do a block; meanwhile a file of `places` has the number of the case."""
    name, first, count = block
    place, kind = _place(block, places), KINDS[name]
    found, saved = list[Outcome](), Counter[str]()
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        kind.furnish(Path(folder))
        run(kind, kind.bases()[0], Path(folder), SILENCE)  # what it imports is not the file's
        gc.collect()
        gc.freeze()  # imports are not a file's: a collection that goes through them takes half a second
        before = _peak(reset=True)
        with limited_memory():
            for number in range(first, first + count):
                place.write_text(str(number))
                faulthandler.dump_traceback_later(BLOCKED, exit=True)
                outcome = run(kind, Case(kind, number).data, Path(folder))
                if outcome.problem.startswith("TooSlow"):  # twice, or it was the machine
                    outcome = run(kind, Case(kind, number).data, Path(folder))
                faulthandler.cancel_dump_traceback_later()
                found.append(outcome if outcome.verdict == "failed" else outcome._replace(problem=""))
                if outcome.verdict == "failed":
                    saved[cause(outcome.problem)] += 1
                    if saved[cause(outcome.problem)] <= 3:
                        _keep(save, name, number, outcome.problem)
        peak = _peak() - before
    place.unlink()
    return name, found, peak


def _keep(save: Path, kind: str, number: int, problem: str) -> None:
    """Save a file that failed, and say why."""
    save.mkdir(parents=True, exist_ok=True)
    place = save / f"{kind}-{number}{Path(KINDS[kind].file).suffix}"
    place.write_bytes(Case(KINDS[kind], number).data)
    with (save / "failures.txt").open("a") as file:
        file.write(f"{kind} {number}: {problem!a}\n")
    print(f"{kind} {number}: {ascii(problem)[:400]}", flush=True)


def _peak(reset: bool = False) -> int:
    """Return the most bytes that this process has held at a time, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
