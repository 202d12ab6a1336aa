"""What a run that is kept remembers: where each reply belongs, and which of a batch are known already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvsearch.evaluation.samples import Sample
from kvsearch.tasks.encode import TaskPrompts
from kvsearch.tasks.readings import Reading


class Place(NamedTuple):
    """Where a reply belongs in its run."""

    task: str
    key: str
    question: int
    method: str

    @classmethod
    def of(cls, sample: Sample) -> Place:
        """The place of a sample."""
        return cls(sample.task, sample.key, sample.question, sample.method)


@dataclass(frozen=True)
class Known:
    """What is known of a batch: the samples of the `finished` methods.

    Of these, `left_out` were never done here, so what is left does not share its arithmetic with them.
    """

    samples: list[Sample] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)


class Journal(Protocol):
    """Keeps samples beyond the end of a process."""

    def recall(self, task: TaskPrompts, batch: Sequence[Reading], methods: Iterable[str]) -> Known:
        """What is known of a batch under these methods."""
        ...

    def note(self, task: TaskPrompts, batch: Sequence[Reading], samples: Sequence[Sample]) -> None:
        """Keep samples that were finished together."""
        ...
