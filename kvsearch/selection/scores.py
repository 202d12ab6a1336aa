"""What methods scored by context, and the share of a gap that one closes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvsearch.core.arrays import TIE, Floats
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.evaluation.statistics import CONFIDENCE, group_scores
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import FULL

RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Scores:
    """What methods scored, by context; all arrays are [contexts].

    `sums` are over the questions of a context, by method. Means give every task the same weight.
    """

    tasks: tuple[str, ...]
    questions: Floats
    sums: Mapping[str, Floats]

    @classmethod
    def of(cls, samples: Sequence[Sample], contexts: Contexts | None = None) -> Scores:
        """Return the scores in samples of methods that answered the same questions; errors as for `group_scores`.

        `contexts` say, by task and key, what their contexts are (None: every key is one).
        """
        by_task = group_scores(samples, contexts)
        counted = {task: scores.by_context() for task, scores in by_task.items()}
        tasks = tuple(task for task, (_, sizes) in counted.items() for _ in sizes)
        questions = np.concatenate([sizes for _, sizes in counted.values()]).astype(np.float64)
        methods = next(iter(counted.values()))[0]
        return cls(tasks, questions, {m: np.concatenate([sums[m] for sums, _ in counted.values()]) for m in methods})

    def beside(self, other: Scores) -> Scores:
        """Return the contexts of both, of the methods that both have."""
        both = {name: np.append(sums, other.sums[name]) for name, sums in self.sums.items() if name in other.sums}
        return Scores(self.tasks + other.tasks, np.append(self.questions, other.questions), both)

    def added(self, method: str) -> Floats:
        """Return what each context adds to the mean of a method."""
        return self.sums[method] * self.weights

    def mean(self, method: str) -> float:
        """Return the mean over tasks of the mean over their questions."""
        return float(self.added(method).sum())

    def ranked(self, methods: Sequence[str]) -> list[str]:
        """Rank methods by their means, the highest first; equal ones in the order given."""
        return sorted(methods, key=lambda name: -round(self.mean(name), 9))

    def resampled(self, methods: Sequence[str], seed: int) -> Floats:
        """Return means of methods in every bootstrap resample of the contexts of each task, [methods, resamples].

        All means are of the same resamples, so that their differences are paired.
        """
        rng = np.random.default_rng(seed)
        means = []
        for task in dict.fromkeys(self.tasks):
            mine = np.array([name == task for name in self.tasks])
            sizes = self.questions[mine]
            draws = rng.integers(0, len(sizes), (RESAMPLES, len(sizes)))
            asked = sizes[draws].sum(axis=1)
            means.append([self.sums[name][mine][draws].sum(axis=1) / asked for name in methods])
        mean: Floats = np.mean(means, axis=0)
        return mean

    @cached_property
    def weights(self) -> Floats:
        """What a question of each context counts for the mean."""
        asked = dict.fromkeys(self.tasks, 0.0)
        for task, questions in zip(self.tasks, self.questions.tolist(), strict=True):
            asked[task] += questions
        return np.array([1 / (asked[task] * len(asked)) for task in self.tasks])


def measure_gap_closed(report: Scores, winner: str, baseline: str, seed: int = 0) -> Estimate | None:
    """Return the share of the gap from a baseline to the full cache that a winner closes; None where there is no gap.

    The 95% interval is over bootstrap resamples of the contexts. In a resample without a gap the share is unbounded, on
    the side of the winner's lead there, so where the gap is in doubt an end of the interval may have no bound, NaN.
    """
    lead, whole = (report.mean(name) - report.mean(baseline) for name in (winner, FULL))
    if whole <= TIE:
        return None
    won, base, most = report.resampled([winner, baseline, FULL], seed)
    leads, gaps = won - base, most - base
    unbounded = np.where(leads > TIE, np.inf, np.where(leads < -TIE, -np.inf, 0.0))
    shares = np.where(gaps > TIE, leads / np.where(gaps > TIE, gaps, 1.0), unbounded)
    low = float(np.quantile(shares, (1 - CONFIDENCE) / 2, method="lower"))
    high = float(np.quantile(shares, (1 + CONFIDENCE) / 2, method="higher"))
    return Estimate(lead / whole, low if np.isfinite(low) else np.nan, high if np.isfinite(high) else np.nan)
