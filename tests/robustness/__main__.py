"""Many mutated files, over all kinds, for as long as it takes: `make fuzz`, or one case again.

    python -m tests.robustness --cases 1000000                   # both cores, a table at the end
    python -m tests.robustness --kind plan --from 17 --cases 1    # one case, and what became of it
    python -m tests.robustness --kind plan FILE                   # one file

A case follows from its kind and its number alone. Files that fail are saved, one for each kind and cause.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.robustness.case import MEMORY, Case, Outcome, limited_memory, run
from tests.robustness.kinds import KINDS
from tests.robustness.workers import BLOCK, SILENCE, cause, outcomes

FAILED = Path("runs/fuzz")


@dataclass
class Tally:
    """What became of the cases of a kind."""

    accepted: int = 0
    refused: int = 0
    failed: int = 0
    slowest: float = 0.0
    peak: int = 0  # bytes above what the process had before
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        setattr(self, outcome.verdict, getattr(self, outcome.verdict) + 1)
        self.slowest = max(self.slowest, outcome.seconds)
        if outcome.verdict == "failed":
            self.causes[cause(outcome.problem)] += 1

    @property
    def cases(self) -> int:
        """How many there were."""
        return self.accepted + self.refused + self.failed


def main() -> int:
    """Return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="read this file as one of --kind")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these kinds")
    parser.add_argument("--cases", type=int, default=10_000, help="of all kinds together (default: 10000)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first number of each kind (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--save", type=Path, default=FAILED, help=f"where failing files go (default: {FAILED})")
    args = parser.parse_args()
    kinds = args.kind or list(KINDS)
    if args.file is not None or args.cases == 1:
        kind = KINDS[kinds[0]]
        return _one(kind.name, args.file.read_bytes() if args.file else Case(kind, args.first).data, args.save)
    each = -(-args.cases // len(kinds))
    blocks = [
        (kind, first, min(BLOCK, args.first + each - first))
        for first in range(args.first, args.first + each, BLOCK)
        for kind in kinds
    ]
    tallies = {kind: Tally() for kind in kinds}
    for number in (signal.SIGTERM, signal.SIGINT):  # the table is printed all the same
        signal.signal(number, signal.default_int_handler)
    started = time.monotonic()
    try:
        for number, (kind, found, peak) in enumerate(outcomes(blocks, args.jobs, args.save), 1):
            for outcome in found:
                tallies[kind].add(outcome)
            tallies[kind].peak = max(tallies[kind].peak, peak)
            if number % 50 == 0:
                print(f"{number} of {len(blocks)} blocks, {time.monotonic() - started:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        _print(tallies, time.monotonic() - started)
    return 1 if any(one.failed for one in tallies.values()) else 0


def _one(kind: str, data: bytes, save: Path) -> int:
    with TemporaryDirectory() as folder:
        KINDS[kind].furnish(Path(folder))
        run(KINDS[kind], KINDS[kind].bases()[0], Path(folder), SILENCE)  # what it imports is not the file's
        with limited_memory():
            outcome = run(KINDS[kind], data, Path(folder))
    save.mkdir(parents=True, exist_ok=True)
    (save / f"one-{Path(KINDS[kind].file).name}").write_bytes(data)
    print(f"{kind}: {outcome.verdict} after {outcome.seconds:.3f} s\n{outcome.problem}\n{len(data)} bytes in {save}")
    return 1 if outcome.verdict == "failed" else 0


def _print(tallies: dict[str, Tally], seconds: float) -> None:
    print(f"\n{'kind':<20}{'cases':>10}{'accepted':>10}{'refused':>10}{'failures':>10}{'slowest s':>11}{'peak MB':>9}")
    total = Tally()
    for kind, one in tallies.items():
        _row(kind, one)
        for name in ("accepted", "refused", "failed"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.slowest, total.peak = max(total.slowest, one.slowest), max(total.peak, one.peak)
    _row("all", total)
    print(f"{seconds:.0f} s; limits: 2 s, {MEMORY >> 20} MB")
    for kind, one in tallies.items():
        for why, count in one.causes.most_common():
            print(f"  {kind}: {count} x {why}")


def _row(name: str, one: Tally) -> None:
    print(
        f"{name:<20}{one.cases:>10,}{one.accepted:>10,}{one.refused:>10,}{one.failed:>10,}{one.slowest:>11.3f}"
        f"{one.peak / 2**20:>9.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
