"""Every command that writes, stopped at every write and in forward passes, given again: `make crash`.

    python -m tests.robustness.crash                               # all commands, all faults
    python -m tests.robustness.crash --only evolve --kinds kill
    python -m tests.robustness.crash --every 5                     # each fifth point

Prints a table: commands, points, how many survived, and below it what did not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.robustness.crash.trial import KINDS, Undisturbed
from tests.robustness.inputs import laid_out
from tests.robustness.processes import hold_models, warm
from tests.robustness.writers import WRITERS

STOPPED = [name for name, writer in WRITERS.items() if writer.again is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all points; 1 if one of them was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STOPPED, help="this command; repeatable")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind in args.kinds.split(",")]
    worst, say = 0, sys.stdout.write
    say(f"{'command':28} {'operations':>10} {'passes':>7} {'points':>7} {'survived':>9}\n")
    hold_models()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        made = place / "made"
        for name in args.only or STOPPED:
            writer = WRITERS[name]
            warm(laid_out(writer, made, place / "warm"), writer.words(writer.one))
            reference = Undisturbed.of(writer, made, place / "trials")
            points = list(reference.points(kinds, args.every))
            with get_context("fork").Pool(args.jobs) as pool:
                found = pool.map(reference.problem, points, chunksize=1)
            problems = [(point, problem) for point, problem in zip(points, found, strict=True) if problem is not None]
            counts = len(reference.ended.operations), reference.ended.passes, len(points), len(points) - len(problems)
            say(f"{name:28} {counts[0]:10} {counts[1]:7} {counts[2]:7} {counts[3]:9}\n")
            for point, problem in problems:
                worst = 1
                say(f"    {reference.told(point)}: {problem}\n")
            sys.stdout.flush()
    return worst


if __name__ == "__main__":
    sys.exit(main())
