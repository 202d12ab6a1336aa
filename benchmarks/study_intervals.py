"""How often 95% intervals hold the truth: those that kvsearch makes, beside the percentile bootstrap over contexts.

    python benchmarks/study_intervals.py            # some minutes on one core

Contexts are drawn whose questions are alike to a degree (`CLUSTERING`: 0 not at all; near 1 a context is all right or
all wrong, so most are at an end), at several levels up to the ceiling; differences from none to large, one-sided and
two-sided. Printed are, by contexts and tasks, the lowest and the mean coverage over all cases, and the mean width.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from kvsearch.core.arrays import Floats
from kvsearch.evaluation.statistics import CONFIDENCE, DIFFERENCE_ENDS, SCORE_ENDS, ContextSums, compute_interval

CONTEXTS = (5, 10, 20, 50, 100)
QUESTIONS = (1, 3, 10)
CLUSTERING = (0.0, 0.3, 0.8)
LEVELS = (0.3, 0.5, 0.8, 0.9, 0.95, 0.99)
# chances that a question is won and lost
PAIRS = ((0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.3, 0.0), (0.8, 0.0), (0.05, 0.05), (0.3, 0.1), (0.4, 0.3))
RESAMPLES = 400
# the contexts of each task, by how many the largest has
TASKS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one task": lambda contexts: (contexts,),
    "three tasks": lambda contexts: (contexts,) * 3,
    "and two of 5": lambda contexts: (contexts, 5, 5),
}


def draw_sums(
    rng: np.random.Generator, chances: tuple[float, ...], shape: tuple[int, int], questions: int, clustering: float
) -> Floats:
    """Return what the questions of contexts add up to, [repetitions, contexts].

    Of the `chances` of a question the first counts 1, the second -1, the last nothing.
    """
    shares: Floats = np.broadcast_to(chances, (*shape, len(chances)))
    if clustering > 0:
        weights = rng.gamma(np.maximum(shares * (1 - clustering) / clustering, 1e-9)) + 1e-300 * shares
        shares = weights / weights.sum(-1, keepdims=True)
    counts = rng.multinomial(questions, shares)
    return (counts[..., 0] - counts[..., 1]).astype(np.float64)


def cases(kind: str) -> Iterator[tuple[tuple[float, ...], float]]:
    """Yield chances of outcomes of a question, with the mean that they make."""
    if kind == "scores":
        yield from (((level, 0.0, 1 - level), level) for level in LEVELS)
    else:
        yield from (((won, lost, 1 - won - lost), won - lost) for won, lost in PAIRS)


def bootstrap(tasks: list[ContextSums], rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the ends of percentile bootstrap intervals."""
    means = []
    for sums, sizes in tasks:
        count = len(sizes)
        drawn = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)  # how often each context is drawn
        means.append((drawn @ sums.T) / (drawn @ sizes)[:, None])
    low, high = np.quantile(np.mean(means, axis=0), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000, help="of every case")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    columns = "".join(f"{f'{name}: lowest, mean, width':>33}" for name in ("bootstrap", "kvsearch"))
    print(f"{'':<13}{'contexts':>9}{'tasks':>14}{columns}")
    for kind, (shape, counts), contexts in itertools.product(("scores", "differences"), TASKS.items(), CONTEXTS):
        ends = SCORE_ENDS if kind == "scores" else DIFFERENCE_ENDS
        coverage: dict[str, list[float]] = {"bootstrap": [], "kvsearch": []}
        widths: dict[str, list[float]] = {"bootstrap": [], "kvsearch": []}
        for (chances, truth), questions, clustering in itertools.product(cases(kind), QUESTIONS, CLUSTERING):
            tasks: list[ContextSums] = []
            for count in counts(contexts):
                sums = draw_sums(rng, chances, (asked.repetitions, count), questions, clustering)
                tasks.append((sums, np.full(count, questions)))
            for name, (low, high) in {
                "bootstrap": bootstrap(tasks, rng),
                "kvsearch": compute_interval(tasks, ends),
            }.items():
                coverage[name].append(float(np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))))
                widths[name].append(float(np.mean(high - low)))
        line = f"{kind:<13}{contexts:>9}{shape:>14}"
        for name in coverage:
            told = f"{min(coverage[name]):.3f}  {np.mean(coverage[name]):.3f}  {np.mean(widths[name]):.3f}"
            line += f"{told:>33}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
