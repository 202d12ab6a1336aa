"""How long LU-KV's solver takes on the heads of Llama-3.1-8B, and how much memory.

    python benchmarks/bench_solver.py
    python benchmarks/bench_solver.py --questions 3 --length 32768
    python benchmarks/bench_solver.py --policies 8

Thirty questions, each an importance table of 32 x 8 heads and 4,096 entries, are drawn and solved one after the other
for the 99 ratios of a profile. Heads mix what real ones show: heavy tails ranked anywhere from blindly to perfectly,
flat heads, sparse heads that are zero almost everywhere, and spiky heads with a few huge entries.

With --policies the joint solver chooses a policy for every layer, too, once: each policy ranks the same importance, in
every layer with another quality. It also says by how much a choice for every head would beat one for every layer.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from kvsearch.budgets.joint import JointSolver
from kvsearch.budgets.lukv import MarginalSolver, solve_grid
from kvsearch.core.arrays import Floats
from kvsearch.plan.profile_arrays import GRID_SIZE


def draw_table(rng: np.random.Generator, layers: int, heads: int, length: int) -> Floats:
    """[L, Hkv, T] in no order; every layer has mass 1."""
    shape = (layers, heads, length)
    tail = rng.uniform(0.6, 2.0, (layers, heads, 1))
    importance = rng.standard_exponential(shape)
    importance = np.expm1(importance / tail)
    kind = rng.choice(4, size=(layers, heads), p=[0.7, 0.1, 0.1, 0.1])
    importance[kind == 1] = 1.0 + 0.01 * rng.random((int((kind == 1).sum()), length))
    importance[kind == 2] *= rng.random((int((kind == 2).sum()), length)) < 0.02
    importance[kind == 3] *= 1e4 * (rng.random((int((kind == 3).sum()), length)) < 0.001) + 1
    shares: Floats = importance / importance.sum(axis=(1, 2), keepdims=True)
    return shares


def ranked(rng: np.random.Generator, importance: Floats) -> Floats:
    """Order the entries of every head by a ranking whose quality differs between heads."""
    blindness = rng.exponential(1.0, (*importance.shape[:2], 1))
    score = np.log(importance + 1e-30) + blindness * rng.standard_normal(importance.shape)
    return np.take_along_axis(importance, np.argsort(-score, axis=-1), axis=-1)


def solve_jointly(policies: int, layers: int, heads: int, length: int) -> None:
    """Solve all ratios of a profile for several policies, and print how long it takes and what it gains."""
    rng = np.random.default_rng(0)
    importance = draw_table(rng, layers, heads, length)
    rankings = np.stack([ranked(rng, importance) for _ in range(policies)])
    totals = [(100 - ratio) * importance.size // 100 for ratio in range(1, GRID_SIZE + 1)]
    floor = max(-(-length // 100), 36)
    totals = [max(total, floor * layers * heads) for total in totals]
    start = time.perf_counter()
    solver = JointSolver(rankings, floor)
    pooled = time.perf_counter()
    found = [solver.solve(total) for total in totals]
    stop = time.perf_counter()
    by_head = JointSolver(rankings.reshape(policies, layers * heads, 1, length), floor)
    mass = float(importance.sum())
    print(f"{policies} policies, {layers} x {heads} heads, {length} entries, {GRID_SIZE} ratios")
    print(f"pool and sort {pooled - start:.2f} s  solve {stop - pooled:.2f} s  total {stop - start:.2f} s")
    gap = max((one.bound - one.kept) / mass for one in found)
    print(f"importance kept is at most {gap:.2e} of all below the bound")
    for ratio in (80, 90, 95):
        at = ratio - 1
        total = totals[at]
        single = max(one.kept(one.solve(total)) for one in solver.singles)
        told = (single, found[at].kept, by_head.solve(total).kept)
        print(f"{100 - ratio}% kept: the best policy everywhere {told[0] / mass:.4f}, a policy for every layer "
              f"{told[1] / mass:.4f}, for every head {told[2] / mass:.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--policies", type=int, default=1)
    args = parser.parse_args()
    if args.policies > 1:
        solve_jointly(args.policies, args.layers, args.heads, args.length)
        return

    seconds = dict.fromkeys(("draw", "pool and sort", "solve"), 0.0)
    profile = np.zeros((GRID_SIZE, args.layers, args.heads))
    loss, blocks = 0.0, 0
    for question in range(args.questions):
        clock = [time.perf_counter()]
        rng = np.random.default_rng(question)
        importance = ranked(rng, draw_table(rng, args.layers, args.heads, args.length))
        clock.append(time.perf_counter())
        solver = MarginalSolver(importance, floors=max(-(-args.length // 100), 36))
        clock.append(time.perf_counter())
        local = solve_grid(solver)
        clock.append(time.perf_counter())
        profile += local / args.questions
        evicted = np.arange(importance.shape[-1]) >= solver.solve(importance.size // 5)[..., None]
        loss += np.where(evicted, importance, 0.0).sum(-1).mean() / args.questions
        blocks += len(solver.ends) - 1
        for name, start, stop in zip(seconds, clock, clock[1:], strict=False):
            seconds[name] += stop - start

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{args.questions} questions, {args.layers} x {args.heads} heads, {args.length} entries, {GRID_SIZE} ratios")
    print(f"blocks per question {blocks // args.questions:,}; mean loss at 80% eviction {loss:.6e}")
    print("  ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    print(f"total {sum(seconds.values()):.2f} s, peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
