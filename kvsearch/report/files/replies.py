"""What is answered so far, from the ledger of an evaluation or of a stage of another job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvsearch.evaluation.reply_store import read_replies
from kvsearch.runs.directory import LEDGER


@dataclass(frozen=True)
class Answered:
    """How many questions of each task a method has answered, and what its replies score on the mean."""

    questions: Mapping[str, int]
    score: float


@dataclass(frozen=True)
class Replies:
    """What is there of every method, by its label."""

    methods: Mapping[str, Answered]

    @property
    def count(self) -> int:
        """How many replies there are."""
        return sum(sum(one.questions.values()) for one in self.methods.values())


def read_answered(directory: Path) -> Replies:
    """Return what is finished of the replies in a directory; errors as for `read_replies`, nothing without a ledger."""
    ledger = directory / LEDGER
    samples = list(read_replies(ledger).values()) if ledger.exists() else []
    methods = dict.fromkeys(sample.method for sample in samples)
    found = {}
    for method in methods:
        mine = [sample for sample in samples if sample.method == method]
        tasks = dict.fromkeys(sample.task for sample in mine)
        counts = {task: sum(sample.task == task for sample in mine) for task in tasks}
        found[method] = Answered(counts, fmean(sample.score for sample in mine))
    return Replies(found)
