"""What is compressed as one under a protocol, and the questions that are replied to afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.tasks.encode import Prompt, Question


@dataclass(frozen=True)
class Reading:
    """What one sequence of a batch compresses as one, and the questions it replies to afterwards.

    Question-agnostic: the context; all its questions follow, none of which sees another. Question-aware: context,
    question and the reply's prefix; the reply follows at once.
    """

    prompt: Prompt
    questions: tuple[Question, ...]
    protocol: Protocol

    @property
    def ids(self) -> Tensor:
        """Token ids [T] of what is compressed."""
        if self.protocol == QUESTION_AGNOSTIC:
            return self.prompt.context
        return self.prompt.with_question(self.questions[0])


def readings(prompts: Sequence[Prompt], protocol: Protocol) -> list[Reading]:
    """Return one reading per context (question-agnostic) or per question (question-aware)."""
    if protocol == QUESTION_AGNOSTIC:
        return [Reading(prompt, prompt.questions, protocol) for prompt in prompts]
    return [Reading(prompt, (question,), protocol) for prompt in prompts for question in prompt.questions]


def questions_of(batch: Sequence[Reading]) -> list[tuple[Reading, Question]]:
    """Return the questions of a batch with what they follow: the first of all readings, then the second, and so on."""
    most = max(len(reading.questions) for reading in batch)
    return [(reading, reading.questions[n]) for n in range(most) for reading in batch if n < len(reading.questions)]
