"""Scores of methods by context, and the share of a gap that a method closes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvsearch.core.arrays import TIE, Floats
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.evaluation.statistics import CONFIDENCE, group_scores
from kvsearch.runs.estimates import Estimate

RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of methods by context; all arrays are [contexts].

    `sums` are over the questions of a context, by method. Means give every task the same weight.
    """

    tasks: tuple[str, ...]
    questions: Floats
    sums: Mapping[str, Floats]

    @classmethod
    def of(cls, samples: Sequence[Sample], contexts: Contexts | None = None) -> Scores:
        """Sum the scores of samples by context, for methods on the same questions; errors as for `group_scores`.

        `contexts` say, by task and key, what their contexts are (None: every key is one).
        """
        by_task = group_scores(samples, contexts)
        counted = {task: scores.by_context() for task, scores in by_task.items()}
        tasks = tuple(task for task, (_, sizes) in counted.items() for _ in sizes)
        questions = np.concatenate([sizes for _, sizes in counted.values()]).astype(np.float64)
        methods = next(iter(counted.values()))[0]
        return cls(tasks, questions, {m: np.concatenate([sums[m] for sums, _ in counted.values()]) for m in methods})

    def concatenate(self, other: Scores) -> Scores:
        """Concatenate the contexts of two scores, for the methods that both have."""
        both = {name: np.append(sums, other.sums[name]) for name, sums in self.sums.items() if name in other.sums}
        return Scores(self.tasks + other.tasks, np.append(self.questions, other.questions), both)

    def contributions(self, method: str) -> Floats:
        """Return the contribution of each context to the mean of a method."""
        return self.sums[method] * self.weights

    def mean(self, method: str) -> float:
        """Return the mean over tasks of the mean over their questions."""
        return float(self.contributions(method).sum())

    def rank(self, methods: Sequence[str]) -> list[str]:
        """Rank methods by their means, the highest first; equal ones in the order given."""
        return sorted(methods, key=lambda name: -round(self.mean(name), 9))

    def resample_means(self, methods: Sequence[str], seed: int) -> Floats:
        """Return bootstrap means of methods over resampled contexts of each task, [methods, resamples].

        All methods share the resamples, so their differences are paired.
        """
        rng = np.random.default_rng(seed)
        means = []
        for task in dict.fromkeys(self.tasks):
            in_task = np.array([name == task for name in self.tasks])
            sizes = self.questions[in_task]
            draws = rng.integers(0, len(sizes), (RESAMPLES, len(sizes)))
            drawn_questions = sizes[draws].sum(axis=1)
            means.append([self.sums[name][in_task][draws].sum(axis=1) / drawn_questions for name in methods])
        mean: Floats = np.mean(means, axis=0)
        return mean

    @cached_property
    def weights(self) -> Floats:
        """Weight of a question of each context in the mean."""
        questions_of_task = dict.fromkeys(self.tasks, 0.0)
        for task, questions in zip(self.tasks, self.questions.tolist(), strict=True):
            questions_of_task[task] += questions
        return np.array([1 / (questions_of_task[task] * len(questions_of_task)) for task in self.tasks])


def measure_gap_closed(report: Scores, winner: str, baseline: str, seed: int = 0) -> Estimate | None:
    """Measure the share of the gap from a baseline to the full cache that a winner closes; None without a gap.

    The 95% interval is over bootstrap resamples of the contexts. In a resample without a gap the share is unbounded, on
    the side of the winner's lead there, so where the gap is in doubt an end of the interval may have no bound, NaN.
    """
    lead, gap = (report.mean(name) - report.mean(baseline) for name in (winner, FULL))
    if gap <= TIE:
        return None
    winner_means, baseline_means, full_means = report.resample_means([winner, baseline, FULL], seed)
    leads, gaps = winner_means - baseline_means, full_means - baseline_means
    unbounded = np.where(leads > TIE, np.inf, np.where(leads < -TIE, -np.inf, 0.0))
    shares = np.where(gaps > TIE, leads / np.where(gaps > TIE, gaps, 1.0), unbounded)
    low = float(np.quantile(shares, (1 - CONFIDENCE) / 2, method="lower"))
    high = float(np.quantile(shares, (1 + CONFIDENCE) / 2, method="higher"))
    return Estimate(lead / gap, low if np.isfinite(low) else np.nan, high if np.isfinite(high) else np.nan)
