"""What evaluating many plans costs: all in one run against one run for each, and batches against single prompts.

    python benchmarks/bench_evaluation.py                       # bundled model, 20 plans, 50 contexts of 1,024 tokens
    python benchmarks/bench_evaluation.py --plans 5 --samples 8

Both ways give the same replies; the ratio is that of the seconds in one run of this script. The batch comparison is a
single plan with 1 and with 8 contexts per forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from kvsearch.evaluation.runner import run_encoded
from kvsearch.evaluation.samples import Sample
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.plan.schema import PROTOCOLS, Protocol
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.tasks.encode import TaskPrompts, encode_tasks
from kvsearch.tasks.synthetic.suite import SyntheticTask


def timed(action: Callable[[], list[Sample]]) -> tuple[list[Sample], float]:
    start = time.perf_counter()
    return action(), time.perf_counter() - start


def program_at(model: Any, budget: int) -> Program:
    return Program.uniform(model, create_policy("snapkv"), lambda _: budget)


def one_by_one(
    loaded: LoadedModel, programs: dict[str, Program], encoded: list[TaskPrompts], protocol: Protocol, batch: int
) -> list[Sample]:
    """Return the samples of programs that are run without each other."""
    runs = [run_encoded(loaded, {name: program}, encoded, protocol, batch) for name, program in programs.items()]
    return list(chain.from_iterable(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--samples", type=int, default=50, help="contexts")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--task", default="multikey")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    loaded = load("bundled", LoadOptions())
    encoded = encode_tasks(loaded, [SyntheticTask(args.task, args.length)], args.samples)
    programs = {f"plan {number}": program_at(loaded.model, 64 + 8 * number) for number in range(args.plans)}
    print(f"{args.plans} plans, {args.samples} contexts of {args.length:,} tokens, bundled model")
    for protocol in PROTOCOLS:
        together, one_run = timed(partial(run_encoded, loaded, programs, encoded, protocol, args.batch))
        apart, many_runs = timed(partial(one_by_one, loaded, programs, encoded, protocol, args.batch))
        same = sum(replies(together)[key] == reply for key, reply in replies(apart).items())
        print(f"{protocol}: all together {one_run:.1f} s, one by one {many_runs:.1f} s: {many_runs / one_run:.1f}x; "
              f"{same} of {len(apart)} replies are the same")  # fmt: skip
    batches(loaded, encoded, programs["plan 0"], args)


def batches(loaded, encoded, program, args: argparse.Namespace) -> None:  # type: ignore[no-untyped-def]
    one: Protocol = PROTOCOLS[0]
    run_encoded(loaded, {"plan": program}, encoded, one, args.batch)
    single, slow = timed(lambda: run_encoded(loaded, {"plan": program}, encoded, one, 1))
    batched, fast = timed(lambda: run_encoded(loaded, {"plan": program}, encoded, one, args.batch))
    same = sum(replies(single)[key] == reply for key, reply in replies(batched).items())
    print(f"batch {args.batch}: {fast:.2f} s, batch 1: {slow:.2f} s: {slow / fast:.1f}x; "
          f"{same} of {len(single)} replies are the same")  # fmt: skip


def replies(samples: list[Sample]) -> dict[tuple[str, str, int], str]:
    return {(sample.method, sample.key, sample.question): sample.reply for sample in samples}


if __name__ == "__main__":
    main()
