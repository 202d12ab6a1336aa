"""The reply that is teacher-forced after a question: the model's own under its full cache, or the right one as given.

What an eviction must not change is what the model says without it, so its own greedy reply is taken where that is
right: where the task's metric gives it the full score. Elsewhere, and where own replies are not asked for, it is the
right reply in full as the task words it, `Query.right_reply`. LU-KV takes full-attention decoding (arXiv 2602.08585,
section 4.3); EvolKV's paper leaves open what a loss would be of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, NonFiniteError
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.architecture import is_beyond_switch
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import CPU_BYTES
from kvsearch.plan.schema import Protocol
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.replies import Finished, Replies, find_stop_tokens, has_windows
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import compress_prompts, make_batches, reply_after_prefill
from kvsearch.tasks.base import Answers, Query
from kvsearch.tasks.encode import Reading, TaskPrompts, make_readings
from kvsearch.tasks.metrics import is_forced, is_right, score
from kvsearch.tasks.prompts import cut_at_stop, find_stop

TOGETHER = 8  # sequences that are decoded in one batch
EXTRA_TOKENS = 32  # tokens that an own reply may have more than the right one

Asked = tuple[str, str, int]  # a question by its task, the key of its example and its number there


@dataclass(frozen=True, eq=False)
class ForcedQuestions:
    """A prompt, token ids [T], with questions, token ids [K] each, and the most tokens of each reply, `limits`.

    A single question without tokens: the prompt has it, and the reply follows at once. A reply ends before a token of
    `stop`, or with the token that makes `ended` true of it. `place` is for messages.
    """

    prompt: Tensor
    questions: tuple[Tensor, ...]
    limits: tuple[int, ...]
    stop: frozenset[int]
    place: str
    ended: Finished | None = None

    def kind(self, model: Any) -> object:
        """Return the key that prompts share which can reply in one batch."""
        lengths = tuple(map(len, self.questions))
        questions = lengths if has_windows(model) else lengths[0] > 0
        return self.ended, self.stop, questions, is_beyond_switch(model, len(self.prompt))


def reply_end(task: TaskPrompts) -> Finished | None:
    """Return the predicate that ends an own reply at a stop text; None where the task has none."""
    return task.format.ended(task.task.stops)


def right_reply(task: TaskPrompts, key: str, number: int, query: Query, reply: list[int]) -> list[int]:
    """Return the part of an own reply that is teacher-forced: up to its stop text, in whole tokens.

    Nothing if it is not right, or not scored.

    Raises:
        UsageError: the metric cannot judge it.
    """
    if is_forced(task.task):
        return []
    decode = task.format.decode
    stops = task.task.stops
    said = list(reply)
    # A stop text may begin inside of a token: whole tokens are dropped until nothing of it is left.
    end = find_stop(decode(reply), stops)
    while end is not None and said and len(decode(said)) > end:
        said.pop()
    if said and is_right(score(task.task, key, number, query, cut_at_stop(decode(said), stops))):
        return said
    return []


def limit_own_reply(right: int, limit: int) -> int:
    """Return how many tokens an own reply gets, at most `limit`, as it is used only if it is right.

    A reply that is not right within `EXTRA_TOKENS` tokens more than the `right` reply has hardly ever is later on.
    """
    return min(limit, right + EXTRA_TOKENS) if right else limit


class ForcedAnswer(NamedTuple):
    """Token ids [A] to teacher-force; `own` if they are the model's own reply, else they are the given one."""

    ids: Tensor
    own: bool


def forced_answers(
    loaded: LoadedModel,
    tasks: Sequence[TaskPrompts],
    protocol: Protocol,
    answers: Answers,
    progress: Progress | None = None,
) -> dict[Asked, ForcedAnswer]:
    """Choose the reply that is teacher-forced after every question; empty where the task names no right answer.

    Own replies are made anew at every call, in batches that depend on the questions alone: equal calls, equal replies.

    Raises:
        IncompatibleError: the model emits NaN or infinity under its full cache; a prompt is too long for it.
        UsageError: the metric cannot judge a reply.
    """
    readings = [(task, reading) for task in tasks for reading in make_readings(task.prompts, protocol)]
    forced = {
        (task.task.name, reading.prompt.key, question.number): ForcedAnswer(question.right, own=False)
        for task, reading in readings
        for question in reading.questions
    }
    if answers == "given":
        return forced
    replied = [(task, reading) for task, reading in readings if not is_forced(task.task)]  # texts have no replies
    ends = {task.task.name: reply_end(task) for task in tasks}
    stops = {task.task.name: frozenset(find_stop_tokens(loaded, task.format)) for task in tasks}
    questions = [_asking(task, reading, stops[task.task.name], ends[task.task.name]) for task, reading in replied]
    [made] = parted_replies(loaded, [questions], progress)
    for (task, reading), replies in zip(replied, made, strict=True):
        name = task.task.name
        key = reading.prompt.key
        for question, reply in zip(reading.questions, replies, strict=True):
            if said := right_reply(task, key, question.number, question.query, reply):
                forced[name, key, question.number] = ForcedAnswer(torch.tensor(said), own=True)
    return forced


def parted_replies(
    loaded: LoadedModel, parts: Sequence[Sequence[ForcedQuestions]], progress: Progress | None = None
) -> Iterator[list[list[list[int]]]]:
    """Yield greedy replies under the full cache for each part: token ids by prompt and question.

    Sequences of different parts are not decoded in one batch.

    Raises:
        IncompatibleError: see `forced_answers`.
    """
    apart = has_windows(loaded.model)  # on sliding windows no padding may come before questions

    whole = [[(number, reading) for number, reading in enumerate(part)] for part in parts]
    together = [list(make_batches(part, TOGETHER, lambda numbered: numbered[1].kind(loaded.model))) for part in whole]
    # what ends replies is common to many and has a tokenizer: workers get it once
    ends = list(dict.fromkeys(reading.ended for part in parts for reading in part))
    items = [
        ([replace(reading, ended=None) for _, reading in batch], ends.index(batch[0][1].ended))
        for part in together
        for batch in part
    ]
    replies = with_progress(loaded.map(partial(_replies, ends=ends, apart=apart), items), len(items), progress)
    for part in together:
        by_number = {number: said for batch in part for (number, _), said in zip(batch, next(replies), strict=True)}
        yield [by_number[number] for number in range(len(by_number))]
    next(replies, None)  # there are none left: progress is told of the last


def _replies(
    loaded: LoadedModel, item: tuple[Sequence[ForcedQuestions], int], ends: Sequence[Finished | None], apart: bool
) -> list[list[list[int]]]:
    """Reply to all questions of one batch; where it has few prompts, to several of each at a time unless `apart`.

    The `item` is the batch, and the number of what `ends` its replies.
    """
    part, end = item
    copies = _copies(part, apart)
    programs = {str(copy): make_full_program(loaded.model) for copy in range(copies)}
    prompts = [reading.prompt for reading in part]
    by_question = dict[tuple[int, int], list[int]]()
    with run_attention(loaded.model), _named(part):
        for joint in compress_prompts(loaded.model, programs, prompts, set(part[0].stop), ends[end], CPU_BYTES):
            by_question |= _ask_all(joint.replies, part, [int(copy) for copy in joint.methods], copies)
    return [[by_question[row, number] for number in range(len(reading.questions))] for row, reading in enumerate(part)]


def replies_of_passes(
    model: Any, passes: Sequence[DensePass[Any]], readings: Sequence[ForcedQuestions]
) -> list[list[list[int]]]:
    """Return a model's greedy replies by prompt and question, as `parted_replies`, to prompts that passes have read.

    The model must run the attention implementation "kvsearch".

    Raises:
        IncompatibleError: see `forced_answers`.
    """
    apart = has_windows(model)
    by_number = dict[int, list[list[int]]]()
    for batch in make_batches(range(len(readings)), TOGETHER, lambda number: readings[number].kind(model)):
        part = [readings[number] for number in batch]
        copies = _copies(part, apart)
        prompts = [reading.prompt for reading in part]
        with _named(part):
            some = [passes[number] for number in batch]
            replies = reply_after_prefill(some, prompts, copies, set(part[0].stop), part[0].ended)
            said = _ask_all(replies, part, range(copies), copies)
        for row, number in enumerate(batch):
            by_number[number] = [said[row, question] for question in range(len(readings[number].questions))]
    return [by_number[number] for number in range(len(readings))]


def _copies(part: Sequence[ForcedQuestions], apart: bool) -> int:
    """Return how many questions of each prompt are asked side by side."""
    return 1 if apart else count_side_by_side(len(part), max(len(reading.questions) for reading in part))


def count_side_by_side(prompts: int, questions: int) -> int:
    """Count the questions of each prompt that a batch of so many prompts replies to side by side."""
    return min(questions, max(1, TOGETHER // prompts))


def _ask_all(
    replies: Replies, part: Sequence[ForcedQuestions], copies: Sequence[int], step: int
) -> dict[tuple[int, int], list[int]]:
    """Reply to every `step`-th question of each prompt, beginning with each of `copies`; by prompt and question."""
    by_question = dict[tuple[int, int], list[int]]()
    for first in range(0, max(len(reading.questions) for reading in part), step):
        rows = [(row, first + copy) for copy in copies for row in range(len(part))]
        # a prompt without a question of that number repeats its first one, unheard
        chosen = [(part[row], number if number < len(part[row].questions) else 0) for row, number in rows]
        limits = [
            reading.limits[number] if wanted == number else 1
            for (_, wanted), (reading, number) in zip(rows, chosen, strict=True)
        ]
        questions = [reading.questions[number] for reading, number in chosen]
        by_question.update(zip(rows, replies.ask(questions, limits), strict=True))
    return by_question


@contextmanager
def _named(part: Sequence[ForcedQuestions]) -> Iterator[None]:
    """Name the prompt of a batch at which the model emits NaN."""
    try:
        yield
    except NonFiniteError as error:
        raise IncompatibleError(f"{part[error.row % len(part)].place}: {error}") from error


def _asking(task: TaskPrompts, reading: Reading, stop: frozenset[int], ended: Finished | None) -> ForcedQuestions:
    return ForcedQuestions(
        reading.ids,
        tuple(map(reading.following, reading.questions)),
        tuple(limit_own_reply(len(question.right), question.query.max_new_tokens) for question in reading.questions),
        stop,
        f"task {task.task.name}, example {reading.prompt.key}",
        ended,
    )
