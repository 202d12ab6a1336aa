"""The rule by which a strategy is chosen, so that the choice cannot be luck.

The best of many candidates on the questions they are compared on looks better than it is (the winner's curse), the
more so the more candidates there are. So there are three sets of questions, which have none in common:

1. First stage, part of the selection split: everything is asked, the best few candidates and baselines go on.
2. Second stage, the rest of that split. Nothing was chosen by what is scored there, so leads there are unbiased, which
   those of the first stage are not: the second alone decides whether a candidate is better. The best baseline is the
   one with the highest score in both stages together: more questions choose it, and a maximum of several favours it.
3. Report split: asked once, of what was chosen and of what explains it. Nothing depends on it.

A candidate is accepted if, in the second stage,

- it scores above every baseline there;
- the 95% interval of its lead over the best baseline is above zero; and
- the chance of such a lead, if no finalist is better than that baseline, is at most `Rule.level`.

The chance is that of the largest lead, as there are several finalists. If none is better, the difference of a context
is as likely to be of either sign; so signs are flipped at random, for all finalists alike, and the largest of their
leads, each in units of its spread, is noted (sign-flip test of the maximum; Westfall and Young 1993). That holds for
any number of contexts: with four of them no lead is beyond chance. Several phase settings share the level among them.

With a margin, a mean lead above it takes the place of the last two conditions. Then the best of several finalists is
believed on their word, and an accepted one may be no better than the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.evaluation.statistics import LEVEL, resampled_means, scores_by_task
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.names import FULL

FLIPS = 9999
TIE = 1e-9  # leads that differ by less are equal, but for rounding


@dataclass(frozen=True)
class Rule:
    """How to choose; the reasons are at the head of this file.

    Args:
        top: candidates that reach the second stage.
        kept: baselines that reach it.
        margin: None: the lead must be more than chance. A number: a mean lead above it is enough, [0, 1].
        share: part of the contexts of each task that the first stage has.
        level: chance that a candidate is accepted although none is better than the best baseline, over all phase
            settings together.

    Raises:
        UsageError: one of them is out of range.
    """

    top: int = 5
    kept: int = 3
    margin: float | None = None
    share: float = 0.5
    level: float = 0.05

    def __post_init__(self) -> None:
        lead = 0.0 if self.margin is None else self.margin
        for fine, problem in (
            (self.top >= 1, f"--top {self.top} lets no candidate through: give at least 1"),
            (self.kept >= 1, f"{self.kept} baselines leave nothing to fall back to: keep at least 1"),
            (0 <= lead < 1, f"--margin {lead:g} is outside [0, 1): it is a lead in score, 0.01 is one point of 100"),
            (0 < self.share < 1, f"a first stage with {self.share:g} of the contexts leaves one stage empty"),
            (0 < self.level < 1, f"a level of {self.level:g} is no probability of a wrong choice"),
        ):
            if not fine:
                raise UsageError(problem)


@dataclass(frozen=True)
class GapClosed:
    """Share of the gap between the best baseline and the full cache; an end of the interval may be unbounded, None."""

    mean: float
    low: float | None
    high: float | None


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
        """Return the scores in samples of methods that answered the same questions; errors as for `scores_by_task`.

        `contexts` say, by task and key, what their contexts are (None: every key is one).
        """
        by_task = scores_by_task(samples, contexts)
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
        return self.sums[method] * self._weights

    def mean(self, method: str) -> float:
        """Return the mean over tasks of the mean over their questions."""
        return float(self.added(method).sum())

    def ranked(self, methods: Sequence[str]) -> list[str]:
        """Rank methods by their means, the highest first; equal ones in the order given."""
        return sorted(methods, key=lambda name: -round(self.mean(name), 9))

    def resampled(self, methods: Sequence[str], seed: int) -> Floats:
        """Return means of methods in every bootstrap resample of the contexts of each task, [methods, resamples]."""
        rng, means = np.random.default_rng(seed), []
        for task in dict.fromkeys(self.tasks):
            mine = np.array([name == task for name in self.tasks])
            means.append(resampled_means(rng, [self.sums[name][mine] for name in methods], self.questions[mine]))
        mean: Floats = np.mean(means, axis=0)
        return mean

    @cached_property
    def _weights(self) -> Floats:
        asked = dict.fromkeys(self.tasks, 0.0)
        for task, questions in zip(self.tasks, self.questions.tolist(), strict=True):
            asked[task] += questions
        return np.array([1 / (asked[task] * len(asked)) for task in self.tasks])


def compute_chances(leads: Floats, seed: int = 0) -> Floats:
    """Return the probability of each lead, or a larger one of any finalist, if no finalist is better: [finalists].

    `leads` [finalists, contexts] are what each context adds to the mean lead. See the head of this file.
    """
    scale = np.linalg.norm(leads, axis=1, keepdims=True)
    scaled = np.divide(leads, scale, out=np.zeros_like(leads), where=scale > 0)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (FLIPS, leads.shape[1]))
    largest = (signs @ scaled.T).max(axis=1)
    found: Floats = (1 + (largest[:, None] >= scaled.sum(axis=1) - TIE).sum(axis=0)) / (FLIPS + 1)
    return found


def judge_leads(
    second: Scores, leads: Mapping[str, Difference], best: str, baselines: Sequence[str], rule: Rule, seed: int = 0
) -> dict[str, tuple[float, bool]]:
    """Return the chance of every finalist's lead in the second stage, and whether the finalist is accepted.

    `leads` are paired differences to the baseline `best` there; `baselines` are all that reached it. Without finalists
    there is nothing to accept.
    """
    if not leads:
        return {}
    differences = np.array([second.added(name) - second.added(best) for name in leads])
    found = {}
    for (name, lead), chance in zip(leads.items(), compute_chances(differences, seed).tolist(), strict=True):
        above = all(second.mean(name) > second.mean(other) + TIE for other in baselines)
        sure = lead.low > 0 and chance <= rule.level if rule.margin is None else lead.mean > rule.margin + TIE
        found[name] = chance, above and sure
    return found


def measure_gap_closed(report: Scores, winner: str, baseline: str, full: str = FULL, seed: int = 0) -> GapClosed | None:
    """Return the share of the gap from a baseline to the full cache that a winner closes; None where there is no gap.

    The 95% interval is over bootstrap resamples of the contexts. In a resample without a gap the share is unbounded, on
    the side of the winner's lead there, so where the gap is in doubt an end of the interval may have no bound.
    """
    lead, whole = (report.mean(name) - report.mean(baseline) for name in (winner, full))
    if whole <= TIE:
        return None
    won, base, most = report.resampled([winner, baseline, full], seed)
    leads, gaps = won - base, most - base
    unbounded = np.where(leads > TIE, np.inf, np.where(leads < -TIE, -np.inf, 0.0))
    shares = np.where(gaps > TIE, leads / np.where(gaps > TIE, gaps, 1.0), unbounded)
    low = float(np.quantile(shares, (1 - LEVEL) / 2, method="lower"))
    high = float(np.quantile(shares, (1 + LEVEL) / 2, method="higher"))
    return GapClosed(lead / whole, low if np.isfinite(low) else None, high if np.isfinite(high) else None)
