"""Every command that writes, stopped at every write and in forward passes, given again: `make crash`.

    python -m tests.robustness.crash                               # all commands, all faults: an hour on two cores
    python -m tests.robustness.crash --commands evolve --kinds kill
    python -m tests.robustness.crash --every 5                     # each fifth point

Prints a table: commands, points, how many survived, and below it what did not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.robustness.crash.commands import TYPED, commands
from tests.robustness.crash.faults import KINDS, Kind
from tests.robustness.crash.trial import Command, Ended, Tree, problem_of, undisturbed

Point = tuple[Kind, int]


def points(ended: Ended, kinds: Sequence[Kind], every: int = 1) -> Iterator[Point]:
    """Yield the faults of a command: each operation in every way, each forward pass without memory."""
    for kind in kinds:
        most = ended.passes if kind == "memory" else len(ended.operations)
        yield from ((kind, at) for at in range(1, most + 1, every))


def main() -> int:
    """Try all points; 1 if one of them was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", default=",".join(TYPED), help="names, with commas between them")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    kinds: list[Kind] = [kind for kind in KINDS if kind in args.kinds.split(",")]
    problems: list[str] = []
    print(f"{'command':20} {'operations':>10} {'passes':>7} {'points':>7} {'survived':>9}")
    with TemporaryDirectory() as place, get_context("fork").Pool(args.jobs) as pool:
        for command in commands(Path(place)):
            if command.name in args.commands.split(","):
                problems += _tried(command, Path(place), kinds, args.every, pool)
    print(*problems, sep="\n")
    return 1 if problems else 0


def _tried(command: Command, place: Path, kinds: Sequence[Kind], every: int, pool: Pool) -> list[str]:
    ended, wanted = undisturbed(command, place / "trials" / "reference")

    tried = list(points(ended, kinds, every))
    found = pool.map(partial(_attempt, command, wanted, place / "trials"), tried, chunksize=1)
    problems = [
        f"{command.name}, {kind} at {at} ({'a pass' if kind == 'memory' else ended.operations[at - 1]}): {problem}"
        for (kind, at), problem in zip(tried, found, strict=True)
        if problem is not None
    ]
    counts = len(ended.operations), ended.passes, len(tried), len(tried) - len(problems)
    print(f"{command.name:20} {counts[0]:10} {counts[1]:7} {counts[2]:7} {counts[3]:9}", flush=True)
    return problems


def _attempt(command: Command, wanted: Tree, place: Path, point: Point) -> str | None:
    kind, at = point
    folder = place / f"{kind[0]}{at:08}"  # as long as the name of the reference, as paths are part of some files
    try:
        return problem_of(command, wanted, folder, kind, at)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
