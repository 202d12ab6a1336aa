"""How long LU-KV's solver takes on the heads of Llama-3.1-8B, and how much memory.

    python benchmarks/bench_solver.py
    python benchmarks/bench_solver.py --questions 3 --length 32768

Thirty questions, each an importance table of 32 x 8 heads and 4,096 entries, are drawn and solved one after the other
for the 99 ratios of a profile. Heads mix what real ones show: heavy tails ranked anywhere from blindly to perfectly,
flat heads, sparse heads that are zero almost everywhere, and spiky heads with a few huge entries.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.budgets.lukv import MarginalSolver, profile_grid
from kvsearch.plan import GRID


def draw_importance(rng: np.random.Generator, layers: int, heads: int, length: int) -> Floats:
    """[L, Hkv, T] in the order of a ranking whose quality differs between heads; every layer has mass 1."""
    shape = (layers, heads, length)
    tail = rng.uniform(0.6, 2.0, (layers, heads, 1))
    importance = rng.standard_exponential(shape)
    importance = np.expm1(importance / tail)
    kind = rng.choice(4, size=(layers, heads), p=[0.7, 0.1, 0.1, 0.1])
    importance[kind == 1] = 1.0 + 0.01 * rng.random((int((kind == 1).sum()), length))
    importance[kind == 2] *= rng.random((int((kind == 2).sum()), length)) < 0.02
    importance[kind == 3] *= 1e4 * (rng.random((int((kind == 3).sum()), length)) < 0.001) + 1
    blindness = rng.exponential(1.0, (layers, heads, 1))
    score = np.log(importance + 1e-30) + blindness * rng.standard_normal(shape)
    ranked = np.take_along_axis(importance, np.argsort(-score, axis=-1), axis=-1)
    shares: Floats = ranked / ranked.sum(axis=(1, 2), keepdims=True)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--split", default="best", choices=["best", "partial_block"])
    args = parser.parse_args()

    seconds = dict.fromkeys(("draw", "pool and sort", "solve"), 0.0)
    profile = np.zeros((GRID, args.layers, args.heads))
    loss, blocks = 0.0, 0
    for question in range(args.questions):
        clock = [time.perf_counter()]
        importance = draw_importance(np.random.default_rng(question), args.layers, args.heads, args.length)
        clock.append(time.perf_counter())
        solver = MarginalSolver(importance, floors=max(-(-args.length // 100), 36), split=args.split)
        clock.append(time.perf_counter())
        local = profile_grid(solver)
        clock.append(time.perf_counter())
        profile += local / args.questions
        evicted = np.arange(importance.shape[-1]) >= solver.solve(importance.size // 5)[..., None]
        loss += np.where(evicted, importance, 0.0).sum(-1).mean() / args.questions
        blocks += len(solver.whole_totals) - 1
        for name, start, stop in zip(seconds, clock, clock[1:], strict=False):
            seconds[name] += stop - start

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{args.questions} questions, {args.layers} x {args.heads} heads, {args.length} entries, {GRID} ratios")
    print(f"blocks per question {blocks // args.questions:,}; mean loss at 80% eviction {loss:.6e}")
    print("  ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    print(f"total {sum(seconds.values()):.2f} s, peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
