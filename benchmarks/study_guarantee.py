"""What guarantees hold, and what they cost: resamples of the replies of an evaluation, one loss per context.

    kvsearch evaluate bundled --tasks synthetic:single,multikey --length 512 --samples 100 \
        --methods pooled,kvzip --budgets 14,16,20,24,32,48,64,96 -o runs/guarantee
    python benchmarks/study_guarantee.py runs/guarantee            # a minute on one core

The contexts of the run are the whole world: resamples draw from them, so what every method loses in the long run is
known. Printed are, by loss bound and contexts, of 1,000 resamples:

- wrong: how often a bound is shown that is not kept, for the worst method; losses are made fewer by chance until their
  mean is just above the bound, which is the hardest case (thinned), or are as they are. Coverage is the rest.
- size: what the fixed sequence over sizes, from large to small, ends at on the mean, beside the smallest size whose
  mean loss on the same contexts is no more than the bound (the point estimate), and how often either loses more
  in the long run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvsearch.core.arrays import Floats
from kvsearch.evaluation.guarantee import (
    compute_hoeffding_bentkus,
    compute_log_wealth,
    count_needed_contexts,
    count_shown,
    measure_context_losses,
)
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.evaluation.samples import Sample
from kvsearch.runs.identity import LEDGER

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2)
CONTEXTS = (30, 60, 120, 300)
CONFIDENCE = 0.95
RESAMPLES = 1000
AT_BOUND = 20_000  # resamples of thinned losses: a worst of many methods looks worse than it is on few
JUST_ABOVE = 1 + 1e-6


def read_losses(directory: Path) -> dict[str, dict[float, Floats]]:
    """Return the losses [contexts] of an evaluation by method and size in entries, the largest size first."""
    samples: list[Sample] = list(read_replies(directory / LEDGER).values())
    contexts = {(sample.task, sample.key): f"{sample.task} {sample.key}" for sample in samples}
    ordered = sorted(samples, key=lambda sample: (sample.task, sample.key, sample.question))
    losses: dict[str, dict[float, Floats]] = {}
    for label in dict.fromkeys(sample.method for sample in ordered if sample.method != FULL):
        held = float(np.mean([sample.entries for sample in ordered if sample.method == label]))
        method = label.partition("@")[0].partition(" ")[0]
        losses.setdefault(method, {})[held] = measure_context_losses(ordered, label, contexts)
    return {method: dict(sorted(sizes.items(), reverse=True)) for method, sizes in losses.items()}


def count_wrong(rng: np.random.Generator, world: Floats, bound: float, contexts: int) -> tuple[float, float, float]:
    """Return how often a bound that is not kept is shown: as losses are, thinned, and thinned by Hoeffding-Bentkus."""
    mean = float(world.mean())
    if mean <= bound:
        return 0.0, 0.0, 0.0
    needed = -np.log(1 - CONFIDENCE)
    drawn = world[rng.integers(0, len(world), (RESAMPLES, contexts))]
    as_they_are = np.mean(compute_log_wealth(drawn, bound, CONFIDENCE) >= needed)
    drawn = world[rng.integers(0, len(world), (AT_BOUND, contexts))]
    thinned = np.where(rng.random(drawn.shape) < JUST_ABOVE * bound / mean, drawn, 0.0)
    at_bound = np.mean(compute_log_wealth(thinned, bound, CONFIDENCE) >= needed)
    means, counts = np.unique(thinned.mean(1), return_counts=True)
    shown = np.array([compute_hoeffding_bentkus(float(of), contexts, bound) <= 1 - CONFIDENCE for of in means])
    return float(as_they_are), float(at_bound), float(counts[shown].sum() / AT_BOUND)


def compare_sizes(
    rng: np.random.Generator, worlds: Mapping[float, Floats], bound: float, contexts: int
) -> tuple[float, float, float, float, float]:
    """Return how often a size is shown, its mean and that of the point estimate, and how often either loses more."""
    sizes = list(worlds)
    table = np.stack(list(worlds.values()))
    truth = table.mean(1)
    shown, guessed, wrong, missed = [], [], 0, 0
    for _ in range(RESAMPLES):
        drawn = table[:, rng.integers(0, table.shape[1], contexts)]
        count = count_shown(drawn, bound, CONFIDENCE)
        if not count:
            continue
        small = [number for number, losses in enumerate(drawn) if losses.mean() <= bound]
        shown.append(sizes[count - 1])
        guessed.append(sizes[small[-1]])
        wrong += truth[count - 1] > bound
        missed += truth[small[-1]] > bound
    if not shown:
        return 0.0, np.nan, np.nan, 0.0, np.nan
    return (
        len(shown) / RESAMPLES, float(np.mean(shown)), float(np.mean(guessed)), wrong / RESAMPLES, missed / len(shown),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What guarantees hold, and what they cost.")
    parser.add_argument("directory", type=Path, help="of `kvsearch evaluate -o`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    losses = read_losses(options.directory)
    rng = np.random.default_rng(options.seed)
    worlds = {f"{method} {size:.0f}": of for method, sizes in losses.items() for size, of in sizes.items()}
    contexts = len(next(iter(worlds.values())))
    print(f"{contexts} contexts, {RESAMPLES} resamples, {100 * CONFIDENCE:g}% confidence; mean losses in points:")
    print(", ".join(f"{name} {100 * world.mean():.1f}" for name, world in worlds.items()))
    print("\n| bound | contexts | wrong as they are | wrong thinned | Hoeffding-Bentkus thinned |")
    print("|---|---|---|---|---|")
    for bound in BOUNDS:
        for count in CONTEXTS:
            wrong = np.max([count_wrong(rng, world, bound, count) for world in worlds.values()], axis=0)
            print(f"| {100 * bound:g} | {count} | {' | '.join(f'{100 * share:.1f}%' for share in wrong)} |")
    for method, sizes in losses.items():
        print(f"\n| {method}: bound | contexts | shown | entries | estimate | wrong | wrong estimate |")
        print("|---|---|---|---|---|---|---|")
        for bound in BOUNDS:
            for count in CONTEXTS:
                if count < count_needed_contexts(bound, CONFIDENCE):
                    continue
                share, mean, guess, bad, missed = compare_sizes(rng, sizes, bound, count)
                ends = f"{mean:.0f} | {guess:.0f} | {100 * bad:.1f}% | {100 * missed:.1f}%"
                print(f"| {100 * bound:g} | {count} | {100 * share:.0f}% | {ends} |")


if __name__ == "__main__":
    main()
