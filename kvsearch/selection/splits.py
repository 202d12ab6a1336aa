"""Questions that a result is found by and questions that it is reported on: how they are divided, and kept apart."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvsearch.core.errors import UsageError
from kvsearch.plan.size import round_half_up
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, token_hash
from kvsearch.tasks.splits import group_by_text

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


def split_contexts(
    encoded: Sequence[TaskPrompts], share: float, seed: int
) -> tuple[list[TaskPrompts], list[TaskPrompts]]:
    """Divide the contexts of every task at random: `share` of them, at least one, and the rest, at least one.

    Equal contexts, such as one document with several sets of questions, stay together, also those of several tasks:
    a text is where the task with the fewest contexts has it.

    Raises:
        UsageError: a task has one context, or shares with others all that is left for one part.
    """
    texts_of = {}
    for task in encoded:
        groups = group_by_text(task.recorded[prompt.key] for prompt in task.prompts)
        texts_of[task.task.name] = [task.recorded[task.prompts[group[0]].key] for group in groups]
    is_first: dict[tuple[str, ...], bool] = {}
    for name, texts in sorted(texts_of.items(), key=lambda item: len(item[1])):
        random.Random(f"{seed}/{name}").shuffle(texts)
        count = min(max(round_half_up(share * len(texts)), 1), len(texts) - 1)
        shared = sum(is_first.get(text, False) for text in texts)
        fresh = [text for text in texts if text not in is_first]
        is_first |= {text: number < count - shared for number, text in enumerate(fresh)}
        if not 0 < sum(is_first[text] for text in texts) < len(texts):
            raise UsageError(
                f"task {name} has too few contexts to select by: two stages need two or more that no other task has, "
                "ask more --samples"
            )
    first = [_part(task, {text for text, early in is_first.items() if early}) for task in encoded]
    second = [_part(task, {text for text, early in is_first.items() if not early}) for task in encoded]
    return first, second


def _part(task: TaskPrompts, texts: set[tuple[str, ...]]) -> TaskPrompts:
    """Return the part of a task that is about some texts."""
    prompts = tuple(prompt for prompt in task.prompts if task.recorded[prompt.key] in texts)
    coverage = replace(
        task.coverage,
        contexts=len(prompts),
        truncated=sum(prompt.truncated for prompt in prompts),
        questions=sum(len(prompt.questions) for prompt in prompts),
        shortest=min(len(prompt.context) for prompt in prompts),
        longest=max(len(prompt.context) for prompt in prompts),
    )
    return replace(task, prompts=prompts, coverage=coverage)
