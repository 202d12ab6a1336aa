"""Calibration data of tasks: budgets are fitted to what a user asks, on questions that evaluations do not ask."""

from __future__ import annotations

from collections.abc import Sequence

from kvsearch.calibration.data import CalibrationData, Context, Pair, content_hash
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.tasks.base import Query, Task
from kvsearch.tasks.encode import check_length, counter, most_tokens
from kvsearch.tasks.prompts import PLAIN_PROMPT
from kvsearch.tasks.texts import is_blank


def data_of_tasks(
    loaded: LoadedModel, tasks: Sequence[Task], samples: int, seed: int, max_length: int | None = None
) -> CalibrationData:
    """Return the first `samples` contexts of every task with their questions; right replies are the answers.

    They are drawn as an evaluation draws them. Questions without an answer are left out.

    Raises:
        UsageError: a task has no usable question, or fills contexts to a length above the limit; see `check_length`.
    """
    count, limit = counter(loaded.tokenizer), most_tokens(loaded.model, max_length)
    contexts: list[Context] = []
    for task in tasks:
        check_length(loaded, task, limit)
        before = len(contexts)
        for example in task.examples(samples, seed, count):
            pairs = tuple(pair for query in example.queries if (pair := _pair(query)) is not None)
            if pairs and not is_blank(example.context):
                contexts.append(Context(example.context, pairs, task.prompt, task.chat))
        if len(contexts) == before:
            raise UsageError(f"task {task.name} has no question with an answer to calibrate on: leave it out")
    return CalibrationData(
        "+".join(task.name for task in tasks), PLAIN_PROMPT, tuple(contexts), content_hash("", contexts)
    )


def _pair(query: Query) -> Pair | None:
    """Return a question with its right reply; None if one of them is missing."""
    answer = next((answer for answer in query.answers if not is_blank(answer)), None)
    if answer is None or is_blank(query.question):
        return None
    return Pair(question=query.question, answer=answer, prefix=query.prefix, max_new_tokens=query.max_new_tokens)
