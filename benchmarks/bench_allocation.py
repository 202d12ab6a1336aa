"""What deciding budgets at run time costs a prefill: time and peak memory against SnapKV with static budgets.

    python benchmarks/bench_allocation.py                 # random Llama, 8 layers of width 512, 4,096 tokens
    python benchmarks/bench_allocation.py --rounds 15

All methods run in every round, in turn; a ratio is the median over the rounds of a method's time over that of SnapKV in
the same round. Memory is the most that is allocated at a time during the forward pass, activations included, as the
allocator records it; "kept" is what the cache holds afterwards.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from bench_policies import load, prefill
from torch import Tensor

from kvsearch.benchmark.speed import measure_peak_bytes
from kvsearch.budgets.dynamic import create_allocation
from kvsearch.models.architecture import describe
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program

REFERENCE = "snapkv, static"
METHODS = {
    REFERENCE: ("snapkv", "static"),
    "lava, static": ("lava", "static"),
    "snapkv, adakv": ("snapkv", "adakv"),
    "cake, cake": ("cake", "cake"),
    "lava, lava": ("lava", "lava"),
}


def program_of(model: Any, method: str, budget: int) -> Program:
    policy, allocation = METHODS[method]
    return Program.uniform(model, create_policy(policy), lambda _: budget, create_allocation(allocation))


def memory(model: Any, program: Program, ids: Tensor) -> tuple[float, float]:
    """Peak MB of a forward pass and MB held after it."""
    cache = PlanCache(model, program)
    peak = measure_peak_bytes(model.device, lambda: prefill(model, ids, cache))
    return peak / 1e6, cache.nbytes() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundled", action="store_true", help="the bundled model instead of a random one")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt (1,024 with --bundled)")
    parser.add_argument("--budget", type=int, default=None, help="entries per kv head (default: a quarter)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    args.length = min(args.length, 1024) if args.bundled else args.length
    args.budget = args.budget or args.length // 4
    model = load(args)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, args.length), generator=generator).to(model.device)
    programs = {method: program_of(model, method, args.budget) for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for method in METHODS:
        prefill(model, ids, PlanCache(model, programs[method]))
    for _ in range(args.rounds):
        for method, program in programs.items():
            seconds[method].append(prefill(model, ids, PlanCache(model, program)))
    shape = describe(model)
    print(f"{shape.layers} layers, {shape.query_heads}/{shape.kv_heads} heads of {shape.head_dim}, {model.dtype}, "
          f"{model.device}, {torch.get_num_threads()} threads; {args.length:,} tokens, budget {args.budget:,}; medians "
          f"of {args.rounds} rounds")  # fmt: skip
    print(f"{'policy, allocation':20} {'seconds':>8} {'of snapkv':>10} {'peak MB':>8} {'of snapkv':>10} {'MB kept':>8}")
    base = memory(model, programs[REFERENCE], ids)[0]
    for method, program in programs.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[method], seconds[REFERENCE], strict=True))
        most, kept = memory(model, program, ids)
        print(f"{method:20} {statistics.median(seconds[method]):8.3f} {ratio - 1:+10.1%} {most:8.1f} "
              f"{most / base - 1:+10.1%} {kept:8.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
