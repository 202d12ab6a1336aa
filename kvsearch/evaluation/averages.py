"""Scores of all methods of one size side by side: per task, per category, and as the averages that papers name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvsearch.errors import InternalError
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.evaluation.statistics import Row, summarize
from kvsearch.plan import Size
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.names import FULL
from kvsearch.tasks.base import Task
from kvsearch.tasks.longbench.specs import AVERAGES
from kvsearch.tasks.longbench.task import LongBenchTask

if TYPE_CHECKING:
    from kvsearch.strategies.compared import ReadyMethod

MACRO = "macro"  # the plain mean over all tasks


class Outcomes(NamedTuple):
    """On how many tasks a method won, tied and lost."""

    wins: int
    ties: int
    losses: int


@dataclass(frozen=True)
class SizeBlock:
    """Methods of one size (None: of plans and their baselines), by name and label; the full cache is in all blocks.

    The rows are the tasks, then categories if there are several, then the named averages.
    """

    size: Size | None
    methods: dict[str, str]
    subject: str  # its label
    rows: list[Row]

    def tasks_won(self, label: str) -> Outcomes | None:
        """Return on how many tasks a method's mean is above, at and below the subject's; None if the tasks are one.

        Source: LAVa, Fig. 5 (winning rates).
        """
        tasks = [row.scores for row in self.rows if row.kind == "task"]
        if len(tasks) == 1:
            return None
        signs = Counter(int(np.sign(scores[label].mean - scores[self.subject].mean)) for scores in tasks)
        return Outcomes(signs[1], signs[0], signs[-1])

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
        found.append(SizeBlock(size, labels, label, _rows(mine, label, averages, seed, contexts)))
    return found


def _rows(
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
