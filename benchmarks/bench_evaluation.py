"""What evaluating many plans costs: all in one run against one run for each, and batches against single prompts.

    python benchmarks/bench_evaluation.py                       # bundled model, 20 plans, 50 contexts of 1,024 tokens
    python benchmarks/bench_evaluation.py --plans 5 --samples 8
    python benchmarks/bench_evaluation.py --only rows --model DIR --dtype bfloat16 --tasks ruler:niah_single_2 \\
        --samples 8 --length 1000                               # rows that leave a batch, in seconds of one processor

Both ways give the same replies; the ratio is that of the seconds in one run of this script. The batch comparison is a
single plan with 1 and with 8 contexts per forward pass. Rows leave a batch when their replies end: that is compared
with all of them staying to the end of the slowest, for the full cache and 5 policies at 2 sizes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch

from kvsearch.evaluation.runner import run_encoded
from kvsearch.evaluation.samples import Sample
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.plan.schema import PROTOCOLS, Protocol
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.decode import replies as decoding
from kvsearch.runtime.program import full_cache
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.encode import TaskPrompts, encode_tasks

POLICIES = ("snapkv", "streaming", "keydiff", "tova", "h2o")


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
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tasks", default="synthetic:multikey")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", choices=["plans", "rows"], help="one of the comparisons")
    parser.add_argument("--rounds", type=int, default=2, help="of the comparison of rows")
    args = parser.parse_args()
    loaded = load(args.model, LoadOptions(dtype=args.dtype))
    encoded = encode_tasks(loaded, find_tasks(args.tasks, {"length": [args.length]}), args.samples)
    if args.only != "rows":
        plans(loaded, encoded, args)
    if args.only != "plans":
        rows(loaded, encoded, args)


def plans(loaded: LoadedModel, encoded: list[TaskPrompts], args: argparse.Namespace) -> None:
    programs = {f"plan {number}": program_at(loaded.model, 64 + 8 * number) for number in range(args.plans)}
    print(f"{args.plans} plans, {args.samples} contexts of {args.length:,} tokens, {args.model}")
    for protocol in PROTOCOLS:
        together, one_run = timed(partial(run_encoded, loaded, programs, encoded, protocol, args.batch))
        apart, many_runs = timed(partial(one_by_one, loaded, programs, encoded, protocol, args.batch))
        same = sum(replies(together)[key] == reply for key, reply in replies(apart).items())
        print(f"{protocol}: all together {one_run:.1f} s, one by one {many_runs:.1f} s: {many_runs / one_run:.1f}x; "
              f"{same} of {len(apart)} replies are the same")  # fmt: skip
    batches(loaded, encoded, programs["plan 0"], args)


def rows(loaded: LoadedModel, encoded: list[TaskPrompts], args: argparse.Namespace) -> None:
    """Decode to the end of the slowest reply with all rows, and without those whose replies have ended, in turn."""
    torch.set_num_threads(1)
    programs = {"full": full_cache(loaded.model)}
    for policy in POLICIES:
        for share in (0.2, 0.5):
            budgets = partial(kept_of, share)
            programs[f"{policy}, {share} kept"] = Program.uniform(loaded.model, create_policy(policy), budgets)
    usual = decoding.LEFT
    for _ in range(args.rounds):
        seconds, found = {}, {}
        for name, left in (("stay", 0.0), ("leave", usual)):
            decoding.LEFT = left
            start = time.process_time()
            found[name] = run_encoded(loaded, programs, encoded, PROTOCOLS[0], args.batch)
            seconds[name] = time.process_time() - start
        same = sum(
            (one.reply, one.most) == (other.reply, other.most)
            for one, other in zip(found["stay"], found["leave"], strict=True)
        )
        tokens = [sample.reply_tokens for sample in found["leave"]]
        print(
            f"rows stay {seconds['stay']:.1f} s, leave {seconds['leave']:.1f} s: "
            f"{seconds['stay'] / seconds['leave']:.2f}x; {same} of {len(tokens)} replies are the same, "
            f"of {sum(tokens) / len(tokens):.0f} tokens, the longest of {max(tokens)}"
        )


def kept_of(share: float, length: int) -> int:
    return int(share * length)


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
