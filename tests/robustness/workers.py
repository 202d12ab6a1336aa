"""Processes that read mutated files: one that dies or hangs has failed, and all others go on."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.robustness.case import Case, Outcome, limited_memory, run
from tests.robustness.kinds import KINDS

BLOCK = 250  # cases that a process does at a time
SILENCE = 60.0  # seconds of the processor after which a process that says nothing is given up
BLOCKED = 1800.0  # seconds of the clock, as one may wait for something that never comes
OLD = 40  # blocks, after which a process is ended: what it has imported and kept is not that of a new one

Block = tuple[str, int, int]  # kind, first case, how many
Done = tuple[str, list[Outcome], int]


def cause(problem: str) -> str:
    """Return what a failure has in common with others: where it is, without what was in the file."""
    return re.sub(r"\d+", "#", problem.split(": ")[0])


def outcomes(blocks: list[Block], jobs: int, save: Path) -> Iterator[Done]:
    """Do blocks in processes of their own; one that dies or hangs has failed, and its block goes on behind the case."""
    waiting = list(reversed(blocks))
    workers: list[_Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(_Worker(save))
            workers[-1].give(waiting.pop())
        time.sleep(0.01)
        for worker in list(workers):
            done, left = worker.ask()
            if done is not None:
                yield done
            if left is not None and left[2] > 0:
                waiting.append(left)
            if worker.idle and waiting:
                if worker.process.is_alive() and worker.blocks < OLD:
                    worker.give(waiting.pop())
                else:
                    worker.end()
                    workers.remove(worker)
            elif worker.idle or not worker.process.is_alive():
                worker.end()
                workers.remove(worker)


class _Worker:
    """A process that does blocks, and what it does now."""

    def __init__(self, save: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.tasks: SimpleQueue[Any] = context.SimpleQueue()
        self.here, there = context.Pipe(duplex=False)
        self.now = context.Value("q", -1)
        self.process = context.Process(target=_work, args=(self.tasks, there, self.now, save), daemon=True)
        self.process.start()
        there.close()
        self.save, self.idle, self.blocks = save, True, 0
        self.block: Block = ("", 0, 0)
        self.seen, self.since, self.spent = -1, time.monotonic(), 0.0

    def give(self, block: Block) -> None:
        """Let it do a block."""
        self.block, self.idle, self.blocks = block, False, self.blocks + 1
        self.seen, self.since, self.spent = -1, time.monotonic(), _processor_time(self.process.pid)
        self.now.value = -1
        self.tasks.put(block)

    def ask(self) -> tuple[Done | None, Block | None]:
        """Return what is done, and what is left of a block at which the process died."""
        if self.idle:
            return None, None
        try:
            if self.here.poll():
                found = self.here.recv()
                self.idle = True
                return found, None
        except (EOFError, OSError):
            pass
        if self.now.value != self.seen:
            self.seen, self.since, self.spent = self.now.value, time.monotonic(), _processor_time(self.process.pid)
        waited, silent = time.monotonic() - self.since, _processor_time(self.process.pid) - self.spent
        if self.process.is_alive() and silent < SILENCE and waited < BLOCKED:
            return None, None
        kind, first, count = self.block
        case = max(self.now.value, first)
        why = (
            f"no answer for {silent:.0f} s of the processor, {waited:.0f} s of the clock"
            if self.process.is_alive()
            else f"the process ended with {self.process.exitcode}"
        )
        self.end()
        _keep(self.save, kind, case, why)
        outcome = Outcome("failed", silent, why)
        return (kind, [outcome], 0), (kind, case + 1, first + count - case - 1)

    def end(self) -> None:
        """End the process."""
        self.idle = True
        self.process.kill()
        self.process.join()


def _work(tasks: SimpleQueue[Any], answers: Any, now: Any, save: Path) -> None:
    """Do blocks until the process is ended."""
    import gc

    sys.setrecursionlimit(1000)
    for kind in KINDS.values():
        kind.bases()
    saved: Counter[tuple[str, str]] = Counter()
    while True:
        name, first, count = tasks.get()
        kind, found = KINDS[name], []
        with TemporaryDirectory(dir=_memory_disk()) as folder:
            kind.furnish(Path(folder))
            run(kind, kind.bases()[0], Path(folder), SILENCE)  # what it imports is not the file's
            gc.collect()
            before = _peak(reset=True)
            with limited_memory():
                for number in range(first, first + count):
                    now.value = number
                    data = Case(kind, number).data
                    outcome = run(kind, data, Path(folder))
                    found.append(outcome)
                    if outcome.verdict == "failed":
                        why = cause(outcome.problem)
                        saved[name, why] += 1
                        if saved[name, why] <= 3:
                            _keep(save, name, number, outcome.problem)
            peak = _peak() - before
        answers.send(
            (name, [one._replace(problem=one.problem if one.verdict == "failed" else "") for one in found], peak)
        )


def _keep(save: Path, kind: str, number: int, problem: str) -> None:
    """Save a file that failed, and say why."""
    save.mkdir(parents=True, exist_ok=True)
    place = save / f"{kind}-{number}{Path(KINDS[kind].file).suffix}"
    place.write_bytes(Case(KINDS[kind], number).data)
    with (save / "failures.txt").open("a") as file:
        file.write(f"{kind} {number}: {problem!a}\n")
    print(f"{kind} {number}: {ascii(problem)[:400]}", flush=True)


def _processor_time(process: int | None) -> float:
    """Return the seconds that a process has computed; 0 of one that is no more."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _peak(reset: bool = False) -> int:
    """Return the most bytes that this process has held at a time, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
