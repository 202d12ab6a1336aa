"""Splits of contexts for choosing and for reporting: how they are divided and kept disjoint."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, count_coverage, hash_tokens

REPORTED_SPLITS = ("report", "all")  # splits with examples that results are reported on


def refuse_shared(splits: Mapping[str, Sequence[TaskPrompts]]) -> None:
    """Raise UsageError if a context, or a question with its context, is in several splits."""
    split_of: dict[str, str] = {}
    for split, encoded in splits.items():
        for task in encoded:
            for prompt in task.prompts:
                example = f"task {task.task.name}, example {prompt.key}"
                places = {
                    hash_tokens(prompt.with_question(question)): f"{example}, question {question.number}"
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
    """Raise UsageError if a task has the report split: nothing may be fitted or chosen on it."""
    for task in tasks:
        split = getattr(task, "split", None)
        if split in REPORTED_SPLITS:
            raise UsageError(
                f"task {task.name}: split {split!r} has the examples that results are reported on: nothing may be "
                "fitted to them or judged by them, choose the split train or select"
            )


def list_texts(task: TaskPrompts) -> list[tuple[str, ...]]:
    """List the distinct texts of a task, as they are recorded."""
    return list(dict.fromkeys(task.recorded[prompt.key] for prompt in task.prompts))


def divide_contexts(
    encoded: Sequence[TaskPrompts], ends: Sequence[Sequence[int]], seed: int, *, backwards: bool = False
) -> list[list[TaskPrompts]]:
    """Divide the contexts of every task at random into parts that end after `ends` [parts, tasks] texts.

    Prompts about one text, such as one document with several sets of questions, stay together. A task whose texts are
    all in other parts is left out of a part. `backwards` begins with those that come last otherwise.
    """
    parts: list[list[TaskPrompts]] = [[] for _ in ends]
    for number, task in enumerate(encoded):
        texts = list_texts(task)
        random.Random(f"{seed}/{task.task.name}").shuffle(texts)
        if backwards:
            texts.reverse()
        begin = 0
        for part, end in zip(parts, ends, strict=True):
            chosen = set(texts[begin : end[number]])
            prompts = tuple(prompt for prompt in task.prompts if task.recorded[prompt.key] in chosen)
            if prompts:
                coverage = replace(task.coverage, **count_coverage(prompts))
                part.append(replace(task, prompts=prompts, coverage=coverage))
            begin = end[number]
    return parts
