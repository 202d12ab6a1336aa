"""What every task must do; a test class subclasses `TaskContract` and names the task as `--tasks` does.

    class TestMyTask(TaskContract):
        spec = "mine"
        options = {"length": (200,)}

Calibration, choice and report draw examples of one task after each other, and trust that splits share no context and
that a few examples are the first of many: a task that breaks this has its results judged on what they were fitted on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, ClassVar, Final

import pytest

from kvsearch.tasks.base import Example, Query, Task
from kvsearch.tasks.catalog import Entry, describe_tasks, find_tasks
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.splits import ALL

SEEDS: Final = (0, 1, 12345)
WRONG_REPLIES: Final = ("", " ", "\n\n", "none", "7", "a b c", "(A)", "\\boxed{}", "\u7532 \u4e59", "x" * 500)


def count_words(text: str) -> int:
    """Return the number of words of a text, for tasks that fill contexts to a length."""
    return len(text.split())


class TaskContract:
    """Subclasses set `spec` and, where the task needs them, `options` by name, such as a file of rows.

    At most `samples` examples are drawn of a split. `in_order` is off for a task that returns its examples in
    another order than it draws them, such as the cells of a grid: few are then some of more. Override `task` for one
    that is not registered.
    """

    spec: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    samples: ClassVar[int] = 6
    in_order: ClassVar[bool] = True

    def task(self, split: str | None = None) -> Task:
        """Make the task, of its default split or of another."""
        chosen = {} if split is None else {"split": split}
        (task,) = find_tasks(self.spec, {**self.options, **chosen})
        return task

    @property
    def entry(self) -> Entry:
        """The entry of the task in the catalogue, which `kvsearch tasks` shows."""
        (entry,) = describe_tasks(self.spec)
        return entry

    def examples(self, samples: int, seed: int = 0, split: str | None = None) -> Sequence[Example]:
        """Draw examples; warnings, such as of a grid that so few do not fill, are for users."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self.task(split).examples(samples, seed, count_words)

    @property
    def splits(self) -> list[str]:
        """The splits that the task can be made of, without the one of all examples, which overlaps the others."""
        return [split for split in self.entry.splits if split != ALL] if "split" in self.entry.reads else []

    @property
    def queries(self) -> list[Query]:
        return [query for example in self.examples(self.samples) for query in example.queries]

    def test_the_catalogue_describes_it(self) -> None:
        task = self.task()
        assert task.name
        assert PLACE in task.prompt, f"the prompt has no {PLACE}"
        assert (self.entry.category, self.entry.metric) == (task.category, task.metric) or self.options

    def test_few_examples_are_the_first_of_more(self) -> None:
        for seed in SEEDS:
            examples = self.examples(self.samples, seed)
            for samples in range(1, self.samples):
                fewer = self.examples(samples, seed)
                assert list(fewer) == [example for example in examples if example in fewer], f"seed {seed}"
                assert not self.in_order or list(fewer) == list(examples[:samples]), f"seed {seed}"

    def test_a_seed_gives_the_same_examples(self) -> None:
        for seed in SEEDS:
            assert list(self.examples(self.samples, seed)) == list(self.examples(self.samples, seed))

    def test_keys_name_one_example_each(self) -> None:
        for seed in SEEDS:
            keys = [example.key for example in self.examples(self.samples, seed)]
            assert len(set(keys)) == len(keys)

    def test_splits_share_no_context(self) -> None:
        """A context that all examples begin with, such as worked examples, is no text to know: questions count then."""
        drawn = {split: self.examples(self.samples, split=split) for split in self.splits}
        alike = len({example.context for examples in drawn.values() for example in examples}) == 1
        texts = {
            split: {
                (example.system, example.context, example.queries[0].question if alike else "") for example in examples
            }
            for split, examples in drawn.items()
        }
        for split, other in combinations(texts, 2):
            assert not texts[split] & texts[other], f"{split} and {other} share a context"

    def test_every_question_can_be_asked(self) -> None:
        examples = self.examples(self.samples)
        assert 0 < len(examples) <= self.samples
        for example in examples:
            assert example.context.strip()
            assert example.queries
            for query in example.queries:
                assert query.max_new_tokens > 0

    def test_a_right_reply_has_the_full_score(self) -> None:
        task = self.task()
        for query in self.queries:
            if query.right_reply is not None:
                score = task.score(query.right_reply, query)
                assert score == pytest.approx(1, abs=1e-6), f"{query.right_reply!r} to {query.question!r}"

    def test_scores_lie_between_0_and_1(self) -> None:
        task = self.task()
        for query in self.queries:
            for reply in (*WRONG_REPLIES, *query.answers, query.question):
                assert 0 <= task.score(reply, query) <= 1, repr(reply)
