"""What compared plans had seen of the contexts that they are asked: a score on those says little about others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsearch.plan.contexts import USES, ContextRecord, Use
from kvsearch.tasks.encode import TaskPrompts

UNKNOWN = "which contexts it was fitted and chosen on is not known"


@dataclass(frozen=True)
class Seen:
    """The record of a method, None where it is not known, and how many of the `asked` contexts are in it, by use."""

    record: ContextRecord | None
    asked: int
    shared: Mapping[Use, int]

    @classmethod
    def of(cls, record: ContextRecord | None, encoded: Sequence[TaskPrompts]) -> Seen:
        """Compare a record with what is asked."""
        prompts = [prompt.hashes for task in encoded for prompt in task.prompts]
        known = record or ContextRecord()
        shared = {use: sum(any(map(getattr(known, use).has, one)) for one in prompts) for use in USES}
        return cls(record, len(prompts), shared)

    @property
    def warning(self) -> str | None:
        """Why the score is not to be believed, if it is not.

        A sketch takes some contexts for its own by chance: twice as many as it is expected to are none.
        """
        told = [f"{use} on {self.shared[use]}" for use in ("fitted", "chosen") if self._is_shared(use)]
        if not told:
            return None
        return (
            f"it was {' and '.join(told)} of the {self.asked} contexts asked here, so its score is too good: ask "
            "others (--seed, --split or --tasks)"
        )

    @property
    def notes(self) -> list[str]:
        """What is to be said of it beside its scores."""
        if self.record is None:
            return [f"{UNKNOWN} (it was written by hand or by an older version)"]
        chosen, found = self.record.chosen, [] if self.warning is None else [self.warning]
        if chosen.questions:
            found.append(f"it was chosen on {chosen.questions} questions about {chosen.contexts} contexts")
        if not self.record.complete:
            found.append(f"of a part of what it was made of, {UNKNOWN}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all that is known; questions and contexts are those of the record, `asked_here` those in both."""
        if self.record is None:
            return {"known": False}
        sets: dict[str, Any] = {
            use: {
                "contexts": getattr(self.record, use).contexts, "questions": getattr(self.record, use).questions,
                "asked_here": self.shared[use],
            }
            for use in USES
        }  # fmt: skip
        return {"known": True, "complete": self.record.complete, **sets}

    def _is_shared(self, use: Use) -> bool:
        sketch = getattr(self.record or ContextRecord(), use).sketch
        return self.shared[use] > (0 if sketch is None else 2 * sketch.false_positives * self.asked)
