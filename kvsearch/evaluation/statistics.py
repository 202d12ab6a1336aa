"""Means, paired differences and their 95% intervals by a seeded bootstrap over contexts, and blocks of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import InternalError
from kvsearch.evaluation.samples import Contexts, Sample, context_of
from kvsearch.plan import Size
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.strategies.names import FULL
from kvsearch.tasks.base import Task
from kvsearch.tasks.longbench import AVERAGES, LongBenchTask

if TYPE_CHECKING:
    from kvsearch.strategies.compared import ReadyMethod

RESAMPLES = 2000
LEVEL = 0.95
AVERAGE = "average"
MACRO = "macro"  # the plain mean over all tasks

Kind = Literal["task", "category", "average"]


@dataclass(frozen=True)
class Row:
    """One task, or the plain mean over the tasks of a category or over all tasks.

    Of a task whose questions are of several categories, those of the category count there.

    Scores are per method, differences those of the subject to each other method. Means give every task the same weight;
    wins, ties and losses are sums over its questions.
    """

    task: str
    kind: Kind
    questions: int
    scores: dict[str, Estimate]
    differences: dict[str, Difference]


class TaskScores(NamedTuple):
    """What the questions of one task scored: of every method, an array [questions] in the same order."""

    categories: tuple[str, ...]  # [questions]
    contexts: Ints  # [questions]: which context each belongs to
    by_method: dict[str, Floats]

    def of(self, category: str) -> TaskScores:
        """Return what the questions of one category scored."""
        mine = np.array([one == category for one in self.categories])
        if mine.all():
            return self
        _, contexts = np.unique(self.contexts[mine], return_inverse=True)
        found = {method: scores[mine] for method, scores in self.by_method.items()}
        return TaskScores((category,) * len(contexts), contexts, found)

    def means(self) -> dict[str, float]:
        """Return the mean score of every method."""
        return {method: float(scores.mean()) for method, scores in self.by_method.items()}

    def by_context(self) -> tuple[dict[str, Floats], Ints]:
        """Return sums over the questions of each context, by method, and how many questions it has; all [contexts]."""
        sums = {m: np.bincount(self.contexts, scores).astype(np.float64) for m, scores in self.by_method.items()}
        return sums, np.bincount(self.contexts)

    def resampled(self, rng: np.random.Generator) -> dict[str, Floats]:
        """Return the mean score of every method in every resample of the contexts."""
        sums, sizes = self.by_context()
        return dict(zip(sums, resampled_means(rng, list(sums.values()), sizes), strict=True))


def resampled_means(rng: np.random.Generator, sums: Sequence[Floats], sizes: Floats | Ints) -> list[Floats]:
    """Return the means in every bootstrap resample of some contexts, [resamples] for each of `sums`.

    `sums` [contexts] are over the questions of a context, of which it has `sizes` [contexts]. All means are of the same
    resamples, so that their differences are paired.
    """
    draws = rng.integers(0, len(sizes), (RESAMPLES, len(sizes)))
    asked = sizes[draws].sum(axis=1)
    return [total[draws].sum(axis=1) / asked for total in sums]


def interval_of(resampled: Floats) -> tuple[float, float]:
    """Return the ends of the 95% interval of resampled means (percentile bootstrap)."""
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def summarize(samples: Sequence[Sample], subject: str, seed: int = 0, contexts: Contexts | None = None) -> list[Row]:
    """Return rows of all tasks, then of their categories where there are several; the last row is of all together.

    `subject` is the method the differences are about. Questions about one context are not independent: whole contexts
    are resampled, within their task. `contexts` say which they are, by task and key (None: every key is one).

    Raises:
        InternalError: the methods did not answer the same questions.
    """
    tasks = scores_by_task(samples, contexts)
    rng = np.random.default_rng(seed)
    resampled = {task: scores.resampled(rng) for task, scores in tasks.items()}

    rows = [_row(name, "task", [scores], [resampled[name]], subject) for name, scores in tasks.items()]
    categories = dict.fromkeys(category for scores in tasks.values() for category in scores.categories)
    for category in categories if len(categories) > 1 else ():
        some = {name: scores.of(category) for name, scores in tasks.items() if category in scores.categories}
        drawn = [resampled[name] if part is tasks[name] else part.resampled(rng) for name, part in some.items()]
        rows.append(_row(category, "category", list(some.values()), drawn, subject))
    if len(rows) > 1:
        rows.append(_row(AVERAGE, "average", list(tasks.values()), list(resampled.values()), subject))
    return rows


def contrast(
    samples: Sequence[Sample], weights: Mapping[str, float], seed: int = 0, contexts: Contexts | None = None
) -> Difference:
    """Return the weighted sum of the scores of some methods, question by question, averaged as `summarize` does.

    With weights of 1 and -1 that is their paired difference, with 1 and several of -1/n the difference to a mean.

    Raises:
        InternalError: the methods did not answer the same questions.
    """
    tasks = scores_by_task([sample for sample in samples if sample.method in weights], contexts).values()
    sums = [task._replace(by_method={AVERAGE: _weighted(task.by_method, weights)}) for task in tasks]
    rng = np.random.default_rng(seed)
    spread: Floats = np.mean([scores.resampled(rng)[AVERAGE] for scores in sums], axis=0)
    mean = float(np.mean([scores.means()[AVERAGE] for scores in sums]))
    return Difference(mean, *interval_of(spread), *_outcomes([scores.by_method[AVERAGE] for scores in sums]))


def estimate(samples: Sequence[Sample], seed: int = 0, contexts: Contexts | None = None) -> Estimate:
    """Return the mean score of one method over all tasks, with its interval, as `summarize` does."""
    method = samples[0].method
    return summarize(samples, method, seed, contexts)[-1].scores[method]


def _weighted(scores: Mapping[str, Floats], weights: Mapping[str, float]) -> Floats:
    total: Floats = np.sum([weight * scores[method] for method, weight in weights.items()], axis=0)
    return np.where(np.abs(total) < 1e-12, 0.0, total)  # a tie stays one whatever the weights


def scores_by_task(samples: Sequence[Sample], contexts: Contexts | None = None) -> dict[str, TaskScores]:
    """Return what every task's questions scored; `contexts` as for `summarize`.

    Raises:
        InternalError: the methods did not answer the same questions.
    """
    return {task: _scores(samples, task, contexts) for task in dict.fromkeys(sample.task for sample in samples)}


def _scores(samples: Sequence[Sample], task: str, contexts: Contexts | None) -> TaskScores:
    mine = [sample for sample in samples if sample.task == task]
    named = {sample.key: context_of(sample, contexts) for sample in mine}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named.values()))}
    categories = {(sample.key, sample.question): sample.category for sample in mine}
    questions = {asked: n for n, asked in enumerate(categories)}
    by_method = {m: np.full(len(questions), np.nan) for m in dict.fromkeys(sample.method for sample in mine)}
    for sample in mine:
        by_method[sample.method][questions[sample.key, sample.question]] = sample.score
    if len(mine) != len(questions) * len(by_method) or any(np.isnan(found).any() for found in by_method.values()):
        raise InternalError(f"task {task}: the methods did not answer the same questions once each")
    places = np.array([numbers[named[key]] for key, _ in questions])
    return TaskScores(tuple(categories.values()), places, by_method)


def _row(
    label: str, kind: Kind, tasks: Sequence[TaskScores], resampled: Sequence[Mapping[str, Floats]], subject: str
) -> Row:
    methods = tasks[0].by_method
    means = {m: float(np.mean([task.means()[m] for task in tasks])) for m in methods}
    spread = {m: np.mean([draws[m] for draws in resampled], axis=0) for m in methods}
    differences = {
        m: Difference(
            means[subject] - means[m],
            *interval_of(spread[subject] - spread[m]),
            *_outcomes([task.by_method[subject] - task.by_method[m] for task in tasks]),
        )
        for m in (methods if subject in methods else ())
        if m != subject
    }
    scores = {m: Estimate(means[m], *interval_of(spread[m])) for m in methods}
    return Row(label, kind, sum(len(task.contexts) for task in tasks), scores, differences)


def _outcomes(differences: Sequence[Floats]) -> tuple[int, int, int]:
    """Return how many questions were won, tied and lost."""
    signs = np.sign(np.concatenate(differences))
    return int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum())


@dataclass(frozen=True)
class SizeBlock:
    """Methods of one size (None: of plans and their baselines), by name and label; the full cache is in all blocks.

    The rows are the tasks, then categories if there are several, then the named averages.
    """

    size: Size | None
    methods: dict[str, str]
    subject: str  # its label
    rows: list[Row]

    @property
    def overall(self) -> Row:
        """The mean over all tasks."""
        for row in self.rows:
            if (row.kind, row.task) == ("average", MACRO):
                return row
        raise InternalError("a block without a mean over all tasks")

    def difference(self, row: Row, label: str) -> Difference:
        """Return a method minus the subject: the paired difference, and the questions it wins, ties and loses."""
        found = row.differences[label]
        # 0.0 - x, not -x: there is a zero with a sign
        mean, low, high = (0.0 - value for value in (found.mean, found.high, found.low))
        return Difference(mean, low, high, found.losses, found.ties, found.wins)


def named_averages(tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """Return the tasks of every average: of all tasks ("macro"), and of papers, where their datasets are there."""
    found = {MACRO: tuple(task.name for task in tasks)}
    known = {task.name for task in tasks if isinstance(task, LongBenchTask)}
    return found | {name: datasets for name, datasets in AVERAGES.items() if known.issuperset(datasets)}


def blocks_of(
    samples: Sequence[Sample],
    methods: Sequence[ReadyMethod],
    subject: str,
    averages: Mapping[str, Sequence[str]],
    seed: int = 0,
    contexts: Contexts | None = None,
) -> list[SizeBlock]:
    """Return a block per size, in the order of the methods; `subject` is a name, `contexts` as for `summarize`."""
    others = [method for method in methods if method.name != FULL]
    found = []
    for size, group in groupby(others, key=lambda method: method.size):
        labels = {method.name: method.label for method in group}
        label = {**labels, FULL: FULL}[subject]
        mine = [sample for sample in samples if sample.method in {FULL, *labels.values()}]
        found.append(SizeBlock(size, labels, label, _averaged_rows(mine, label, averages, seed, contexts)))
    return found


def _averaged_rows(
    samples: Sequence[Sample], subject: str, averages: Mapping[str, Sequence[str]], seed: int, contexts: Contexts | None
) -> list[Row]:
    whole = summarize(samples, subject, seed, contexts)
    rows = [row for row in whole if row.kind != "average"]
    known: dict[frozenset[str], Row] = {frozenset(averages[MACRO]): whole[-1]}
    for name, tasks in averages.items():
        chosen = frozenset(tasks)
        if chosen not in known:
            some = [sample for sample in samples if sample.task in chosen]
            known[chosen] = summarize(some, subject, seed, contexts)[-1]
        rows.append(replace(known[chosen], task=name, kind="average"))
    return rows
