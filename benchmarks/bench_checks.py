"""What a search pays for its checks: ledgers that are on the disk, checksums of files, and looks at scores.

    python benchmarks/bench_checks.py --seconds 120

A search on the bundled model runs as a user would run it. The functions that check are timed wherever they are called,
and their time is told as a share of the whole.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvsearch
import kvsearch.policies.ranking
import kvsearch.runs.ledger
import kvsearch.runs.run
import kvsearch.runtime.eviction
import kvsearch.runtime.sharing
import kvsearch.search.bank.prepared

CHECKS: dict[str, tuple[tuple[Any, str], ...]] = {
    "lines of a ledger on the disk": ((kvsearch.runs.ledger.Ledger, "_append"),),
    "checksums of finished files": ((kvsearch.runs.run, "finish_run"),),
    "form and values of scores": (
        (kvsearch.policies.ranking, "check_scores"),
        (kvsearch.runtime.sharing, "read_checked_lengths"),
        (kvsearch.runtime.eviction, "read_checked_lengths"),
        (kvsearch.search.bank.prepared, "require_finite"),
    ),
}


def watched(action: Callable[..., Any], what: str, seconds: Counter[str], calls: Counter[str]) -> Callable[..., Any]:
    """Count a function's calls and add up its seconds."""

    @functools.wraps(action)
    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return action(*args, **options)
        finally:
            seconds[what] += time.perf_counter() - start  # type: ignore[assignment]
            calls[what] += 1

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=1000, help="of the search")
    parser.add_argument("--samples", type=int, default=10)
    args = parser.parse_args()
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for what, places in CHECKS.items():
        for owner, name in places:
            setattr(owner, name, watched(getattr(owner, name), what, seconds, calls))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        kvsearch.evolve(
            "bundled", output=Path(folder) / "run", budget=64, params={"window": 8}, space="layers",
            samples=args.samples, generations=1_000_000, max_evals=args.candidates,
        )  # fmt: skip
        whole = time.perf_counter() - start
    print(f"a search of {whole:.0f} s on the bundled model, {args.samples} contexts per split")
    for what in CHECKS:
        print(f"  {what:<28} {calls[what]:>7} calls {1000 * seconds[what]:>9.1f} ms {seconds[what] / whole:>8.3%}")
    print(f"  {'together':<28} {calls.total():>7} calls {1000 * seconds.total():>9.1f} ms "
          f"{seconds.total() / whole:>8.3%}")  # fmt: skip


if __name__ == "__main__":
    main()
