"""Calibration data of tasks: budgets are fitted to what a user asks, on questions that evaluations do not ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvsearch.calibration.data import CalibrationData, Context, Pair, content_hash
from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.origin import ContextSet
from kvsearch.runtime.replay.forced_answers import Judge
from kvsearch.tasks.base import Example, Task
from kvsearch.tasks.encode import Prompt, TaskPrompts, check_length, counter, encode, most_tokens, unused
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.prompts import PLAIN_PROMPT


def data_of_tasks(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    max_length: int | None = None,
    used: ContextSet | None = None,
) -> CalibrationData:
    """Return the first `samples` contexts of every task with their questions; right replies in full are the answers.

    They are drawn as an evaluation draws them, none of them `used`. Questions without an answer are left out.

    Raises:
        UsageError: a task has no usable question or no context that is not used, or fills contexts to a length above
            the limit; see `check_length`.
    """
    count = counter(loaded.tokenizer)
    limit = most_tokens(loaded.model, max_length)
    contexts: list[Context] = []
    for task in tasks:
        check_length(loaded, task, limit)
        examples: dict[str, Example] = {}
        for example in unused(task, samples, seed, count, used or ContextSet())[0]:
            answerable = tuple(
                query
                for query in example.queries
                if not (is_blank(query.question) or all(map(is_blank, query.answers)))
            )
            if answerable and not is_blank(example.context):
                examples[example.key] = replace(example, queries=answerable)
        if not examples:
            raise UsageError(f"task {task.name} has no question with an answer to calibrate on: leave it out")
        encoded = encode(loaded.tokenizer, task, list(examples.values()))
        judge = Judge(task, encoded.format)
        contexts += (_context(judge, encoded, prompt, examples[prompt.key].context) for prompt in encoded.prompts)
    return CalibrationData(
        "+".join(task.name for task in tasks), PLAIN_PROMPT, tuple(contexts), content_hash("", contexts)
    )


def _context(judge: Judge, encoded: TaskPrompts, prompt: Prompt, text: str) -> Context:
    """Return a context as records know it, with its questions and what is taken of own replies to them."""
    task = encoded.task
    key = prompt.key
    pairs = tuple(
        Pair(
            question=query.question,
            answer=query.right_reply or "",
            prefix=query.prefix,
            max_new_tokens=query.max_new_tokens,
        )
        for query in (question.query for question in prompt.questions)
    )
    taken = tuple(partial(judge.right, key, question.number, question.query) for question in prompt.questions)
    return Context(text, pairs, task.prompt, task.chat, encoded.recorded[key], taken, judge.ended)
