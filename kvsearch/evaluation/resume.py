"""A run that goes on: replies from its ledger, or from another run where the key says that they would be the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvsearch.evaluation.identity import ReplyKeys
from kvsearch.evaluation.reply_places import Known, Place
from kvsearch.evaluation.reply_store import Ledger
from kvsearch.evaluation.runner import questions_of, score_of
from kvsearch.evaluation.samples import Sample
from kvsearch.tasks.encode import TaskPrompts
from kvsearch.tasks.readings import Reading

Keyed = dict[str, dict[Place, str]]  # by method: the key of each of its places


@dataclass(frozen=True)
class LedgerJournal:
    """Keeps samples in a ledger; scores of recalled replies are computed anew, by the task at hand."""

    ledger: Ledger
    keys: ReplyKeys

    def recall(self, task: TaskPrompts, batch: Sequence[Reading], methods: Iterable[str]) -> Known:
        """See `Journal.recall`. A method is known if all its replies of the batch are; lent ones are written down.

        Raises:
            UsageError: a reply was written under another key than it has, see `Ledger.require`.
        """
        known, samples, lent = Known(), dict[Place, Sample](), list[tuple[str, Sample]]()
        for method, keyed in self._keyed(task, batch, methods).items():
            if keyed.keys() <= self.ledger.samples.keys():
                self.ledger.require(keyed)
                samples.update({place: self.ledger.samples[place] for place in keyed})
                left_out = keyed.keys() <= self.ledger.reused
            elif all(key in self.ledger.lent for key in keyed.values()):
                lent += [(key, _moved(self.ledger.lent[key], task, place)) for place, key in keyed.items()]
                left_out = True
            else:
                continue
            known.finished.add(method)
            if left_out:
                known.left_out.add(method)
        if lent:
            self.ledger.add(lent, reused=True)
            samples.update({Place.of(sample): sample for _, sample in lent})
        known.samples.extend(_scored(samples, task, batch))
        return known

    def note(self, task: TaskPrompts, batch: Sequence[Reading], samples: Sequence[Sample]) -> None:
        """See `Journal.note`."""
        keyed = self._keyed(task, batch, {sample.method for sample in samples})
        self.ledger.add([(keyed[sample.method][Place.of(sample)], sample) for sample in samples])

    def _keyed(self, task: TaskPrompts, batch: Sequence[Reading], methods: Iterable[str]) -> Keyed:
        keyed: Keyed = {method: {} for method in methods}
        for reading, question in questions_of(batch):
            keys = self.keys.of(task, reading.prompt, question)
            for method, places in keyed.items():
                places[Place(task.task.name, reading.prompt.key, question.number, method)] = keys[method]
        return keyed


def _moved(sample: Sample, task: TaskPrompts, place: Place) -> Sample:
    """A reply of another run under the names of this one."""
    return replace(sample, category=task.task.category, **place._asdict())


def _scored(samples: dict[Place, Sample], task: TaskPrompts, batch: Sequence[Reading]) -> Iterator[Sample]:
    asked = {(reading.prompt.key, question.number): (reading, question) for reading, question in questions_of(batch)}
    for place, sample in samples.items():
        reading, question = asked[place.key, place.question]
        score = score_of(task.task, reading.prompt, question, sample.reply)
        yield replace(sample, score=score, truncated=reading.prompt.truncated)
