"""Samples of a search: prompts with the tokens that follow them and a right answer, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import check_length, require_same_rotary
from kvsearch.plan.schema import Protocol
from kvsearch.runtime.decode.replies import Finished
from kvsearch.runtime.replay.forced_answers import Asked, ForcedAnswer
from kvsearch.tasks.encode import Question, Reading, TaskPrompts, hash_tokens, make_readings
from kvsearch.tasks.metrics import score
from kvsearch.tasks.prompts import cut_at_stop


@dataclass(frozen=True, eq=False)
class BankSample:
    """One question of a task, with the compressed prompt before it and the teacher-forced answer after it.

    `answer` [A] are the token ids of the answer, at most as long as a reply; empty where the task has no answers.
    """

    task: TaskPrompts
    reading: Reading
    question: Question
    answer: Tensor

    @property
    def place(self) -> str:
        """Task, example and question, for messages."""
        return f"task {self.task.task.name}, example {self.reading.prompt.key}, question {self.question.number}"

    @cached_property
    def prompt(self) -> Tensor:
        """Token ids [T] of the compressed prompt."""
        return self.reading.ids

    @property
    def question_ids(self) -> Tensor:
        """Token ids between the compressed prompt and the reply, see `Reading.following`."""
        return self.reading.following(self.question)

    @cached_property
    def following(self) -> Tensor:
        """Token ids [K] that are teacher-forced after the prompt: all before the last token of the answer."""
        return torch.cat([self.question_ids, self.answer])[:-1]

    @property
    def predicting(self) -> int:
        """Number of the last rows of `following` that predict answer tokens; the prompt may predict the first one."""
        return min(len(self.answer), len(self.following))

    @property
    def limit(self) -> int:
        """Maximum tokens of a reply."""
        return self.question.query.max_new_tokens

    @cached_property
    def prompt_sha256(self) -> str:
        """SHA-256 of `prompt`; equal for questions that share their compressed context."""
        return hash_tokens(self.prompt)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all tokens before the reply, equal under every protocol."""
        return hash_tokens(self.reading.prompt.with_question(self.question))

    @property
    def finished(self) -> Finished | None:
        """Predicate that tells whether a reply contains a stop text of its task; None if there are no stop texts."""
        return self.task.format.ended(self.task.task.stops)

    def score(self, reply: list[int]) -> float:
        """Return the task's metric of a reply, in [0, 1]; UsageError if it cannot be judged."""
        text = cut_at_stop(self.task.format.decode(reply), self.task.task.stops)
        return score(self.task.task, self.reading.prompt.key, self.question.number, self.question.query, text)


def check_samples(model: Any, samples: Sequence[BankSample]) -> None:
    """Raise IncompatibleError if a prompt and what follows it are too long for the model, or for its rotary factors."""
    for sample in samples:
        check_length(model, len(sample.prompt) + len(sample.following))
        later = max(len(sample.following), len(sample.question_ids) + sample.limit - 1)
        require_same_rotary(model, [len(sample.prompt)], later, sample.place)


def require_answers(samples: Sequence[BankSample]) -> None:
    """Raise UsageError if a sample names no right answer, which a loss needs."""
    for sample in samples:
        if not len(sample.answer):
            raise UsageError(f"{sample.place}: nll needs a right answer, and there is none: search by the metric")


def list_samples(
    tasks: Sequence[TaskPrompts], protocol: Protocol, answers: Mapping[Asked, ForcedAnswer] | None = None
) -> list[BankSample]:
    """List the samples of tasks, by task and example, with these `answers` (None: the right answers of the tasks).

    Question-agnostic: the context is compressed, question and reply follow. Question-aware: context and question are
    compressed together, the reply follows.
    """
    return [
        BankSample(
            task,
            reading,
            question,
            question.right if answers is None else answers[task.task.name, reading.prompt.key, question.number].ids,
        )
        for task in tasks
        for reading in make_readings(task.prompts, protocol)
        for question in reading.questions
    ]
