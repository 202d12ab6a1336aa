"""Questions that a result is found by and questions that it is reported on: how they are divided, and kept apart."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, token_hash

REPORTED = ("report", "all")  # splits with examples that results are reported on


def refuse_shared(splits: Mapping[str, Sequence[TaskPrompts]]) -> None:
    """Raise UsageError if a context, or a question with what it follows, is in several splits."""
    split_of: dict[str, str] = {}
    for split, encoded in splits.items():
        for task in encoded:
            for prompt in task.prompts:
                example = f"task {task.task.name}, example {prompt.key}"
                places = {
                    token_hash(prompt.with_question(question)): f"{example}, question {question.number}"
                    for question in prompt.questions
                }
                places |= dict.fromkeys(task.recorded[prompt.key], f"{example}, its context")
                for digest, place in places.items():
                    first = split_of.setdefault(digest, split)
                    if first != split:
                        raise UsageError(
                            f"{place} is in the {first} and in the {split} split: what a plan is found or chosen by "
                            "says nothing about it, give tasks with splits"
                        )


def refuse_reported(tasks: Sequence[Task]) -> None:
    """Raise UsageError if a task asks what results are reported on: what is fitted or picked would be by them."""
    for task in tasks:
        split = getattr(task, "split", None)
        if split in REPORTED:
            raise UsageError(
                f"task {task.name}: split {split!r} has the examples that results are reported on: nothing may be "
                "fitted to them or judged by them, choose the split train or select"
            )


def divide_contexts(
    encoded: Sequence[TaskPrompts], ends: Sequence[Sequence[int]], seed: int
) -> list[list[TaskPrompts]]:
    """Divide the contexts of every task at random into parts that end after `ends` [parts, tasks] contexts.

    Equal contexts, such as one document with several sets of questions, stay together.
    """
    parts: list[list[TaskPrompts]] = [[] for _ in ends]
    for number, task in enumerate(encoded):
        names = list(dict.fromkeys(task.contexts[prompt.key] for prompt in task.prompts))
        random.Random(f"{seed}/{task.task.name}").shuffle(names)
        begin = 0
        for part, end in zip(parts, ends, strict=True):
            part.append(_part(task, set(names[begin : end[number]])))
            begin = end[number]
    return parts


def halve_contexts(encoded: Sequence[TaskPrompts], seed: int) -> tuple[list[TaskPrompts], list[TaskPrompts]]:
    """Divide the contexts of every task into halves.

    Raises:
        UsageError: a task has one context.
    """
    for task in encoded:
        if task.distinct < 2:
            raise UsageError(
                f"task {task.task.name} has one context to choose by: a budget is looked for on one half and checked "
                "on the other, ask more --samples"
            )
    halves = [(task.distinct + 1) // 2 for task in encoded]
    first, second = divide_contexts(encoded, [halves, [task.distinct for task in encoded]], seed)
    return first, second


def _part(task: TaskPrompts, contexts: set[str]) -> TaskPrompts:
    """Return the part of a task that is about some contexts."""
    prompts = tuple(prompt for prompt in task.prompts if task.contexts[prompt.key] in contexts)
    coverage = replace(
        task.coverage,
        contexts=len(prompts),
        truncated=sum(prompt.truncated for prompt in prompts),
        questions=sum(len(prompt.questions) for prompt in prompts),
        shortest=min(len(prompt.context) for prompt in prompts),
        longest=max(len(prompt.context) for prompt in prompts),
    )
    return replace(task, prompts=prompts, coverage=coverage)
