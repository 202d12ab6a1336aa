"""Means, paired differences and their 95% intervals, by a seeded bootstrap over contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsearch.evaluate.runner import Sample

RESAMPLES = 2000
LEVEL = 0.95
AVERAGE = "average"


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One task (or the plain mean over tasks): scores per method, and the plan's differences to each other method."""

    task: str
    questions: int
    scores: dict[str, Estimate]
    differences: dict[str, Estimate]


def summarize(samples: Sequence[Sample], subject: str, seed: int = 0) -> list[Row]:
    """A row per task and one for the mean over tasks; `subject` is the method the differences are about.

    Questions about one context are not independent: whole contexts are resampled, within their task.
    """
    tables = {task: _table(samples, task) for task in dict.fromkeys(s.task for s in samples)}
    rng = np.random.default_rng(seed)
    draws = {task: rng.integers(0, len(keys), (RESAMPLES, len(keys))) for task, (keys, _, _) in tables.items()}
    resampled = {task: _resample(tables[task][1], draws[task]) for task in tables}
    rows = [
        _row(task, count, {m: table[:, 0].sum() / count for m, table in by_method.items()}, resampled[task], subject)
        for task, (_, by_method, count) in tables.items()
    ]
    if len(rows) > 1:
        methods = rows[0].scores
        means = {m: float(np.mean([row.scores[m].mean for row in rows])) for m in methods}
        spread = {m: np.mean([resampled[task][m] for task in tables], axis=0) for m in methods}
        rows.append(_row(AVERAGE, sum(row.questions for row in rows), means, spread, subject))
    return rows


Sums = dict[str, NDArray[np.float64]]


def _table(samples: Sequence[Sample], task: str) -> tuple[list[str], dict[str, NDArray[np.float64]], int]:
    """Contexts of a task, per method an array [contexts, 2] of score sum and question count, and the question count."""
    mine = [sample for sample in samples if sample.task == task]
    keys = list(dict.fromkeys(sample.key for sample in mine))
    index = {key: number for number, key in enumerate(keys)}
    tables: dict[str, NDArray[np.float64]] = {}
    for sample in mine:
        table = tables.setdefault(sample.method, np.zeros((len(keys), 2)))
        table[index[sample.key]] += (sample.score, 1)
    counts = {int(table[:, 1].sum()) for table in tables.values()}
    return keys, tables, max(counts)


def _resample(tables: Mapping[str, NDArray[np.float64]], draws: NDArray[np.int64]) -> Sums:
    """Mean score of every method in every resample; all methods see the same contexts (paired)."""
    return {m: table[draws, 0].sum(1) / table[draws, 1].sum(1) for m, table in tables.items()}


def _row(task: str, questions: int, means: Mapping[str, float], resampled: Sums, subject: str) -> Row:
    scores = {m: _estimate(float(means[m]), resampled[m]) for m in means}
    differences = {
        m: _estimate(float(means[subject] - means[m]), resampled[subject] - resampled[m])
        for m in means
        if m != subject and subject in means
    }
    return Row(task, questions, scores, differences)


def _estimate(mean: float, resampled: NDArray[np.float64]) -> Estimate:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))
