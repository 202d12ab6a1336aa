"""Splits of examples, and examples of a split that nothing was made on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.origin import ContextSet, hash_context
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, collect_contexts, encode_tasks, list_context_hashes
from kvsearch.tasks.maths import Gsm8kTask
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.splits import ALL, SHARES, SPLITS, Shares, check_split, draw_items, select_split
from kvsearch.tasks.synthetic.suite import SyntheticTask
from kvsearch.tasks.user_files import JsonlTask


def parts(items: list[int], shares: Shares = SHARES) -> dict[str, list[int]]:
    found = {}
    for split in SPLITS:
        try:
            found[split] = select_split(items, split, lambda item: item, "mine", shares)
        except UsageError as error:
            assert "is empty" in str(error)
            found[split] = []
    return found


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=60, unique=True),
    st.sampled_from([SHARES, (0.5, 0.5, 0.0), (0.0, 0.0, 1.0), (0.1, 0.2, 0.7)]),
)
def test_splits_are_disjoint_cover_and_repeat(items: list[int], shares: Shares) -> None:
    found = parts(items, shares)
    assert sorted(item for some in found.values() for item in some) == sorted(items)
    assert parts(items, shares) == found
    for share, split in zip(shares, SPLITS, strict=True):
        assert abs(len(found[split]) - share * len(items)) < 1 + 1e-9


@given(st.lists(st.tuples(st.integers(0, 9), st.integers()), min_size=10, max_size=40))
def test_no_split_divides_a_group(items: list[tuple[int, int]]) -> None:
    items = [*items, *((group, -1) for group in range(10))]
    found = [select_split(items, split, lambda item: item[0], "mine") for split in SPLITS]
    groups = [{item[0] for item in some} for some in found]
    assert [len(some) for some in groups] == [2, 2, 6]
    assert set.union(*groups) == set(range(10))
    assert sum(map(len, found)) == len(items)


def test_what_is_no_split() -> None:
    with pytest.raises(UsageError, match=r"'train' of mine is empty: .* 0.2 : 0.2 : 0.6 into .*, and it has 1 in all"):
        select_split(["one"], "train", lambda item: item, "mine")
    known = r"unknown split 'trian'; did you mean 'train'\? \(known: train, select, report, all\)"
    with pytest.raises(UsageError, match=known):
        check_split("trian")
    assert select_split([3, 1, 2], ALL, lambda item: item, "mine") == [3, 1, 2]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5))
def test_draws_are_nested_and_without_replacement(few: int, more: int, seed: int) -> None:
    items = list(range(25))
    some, all_of_them = draw_items(items, min(few, more), seed), draw_items(items, max(few, more), seed)
    assert len(some) == min(few, more, 25)
    assert len(set(some)) == len(some)
    assert set(some) <= set(all_of_them)


ROWS = 12


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> JsonlTask:
    """A file of twelve contexts."""
    path: Path = tmp_path_factory.mktemp("own") / "own.jsonl"
    line = '{{"context": "bell amber anchor {}", "question": "? vote", "answers": ["anchor"]}}\n'
    path.write_text("".join(line.format("fox " * (number + 1)) for number in range(ROWS)))
    return JsonlTask.load(path)


def drawn(loaded: LoadedModel, task: Task, samples: int, used: ContextSet | None = None, seed: int = 0) -> TaskPrompts:
    (found,) = encode_tasks(loaded, [task], samples, seed, used=used)
    return found


@pytest.mark.parametrize(
    "task", [SyntheticTask("single", 512), RulerTask("niah_multikey_3", 1024)], ids=["synthetic", "ruler"]
)
def test_a_task_that_makes_its_examples_makes_others(loaded: LoadedModel, task: Task) -> None:
    """They are those that come next under the same seed: the order of what is fresh does not depend on what is not."""
    whole = list_context_hashes([drawn(loaded, task, 5)])
    used = ContextSet.of([whole[0], whole[2]])
    found = drawn(loaded, task, 3, used)
    assert list_context_hashes([found]) == [whole[1], whole[3], whole[4]]
    assert (found.coverage.wanted, found.coverage.found, found.coverage.used) == (3, 3, 2)


@given(data=st.data())
def test_a_task_with_a_number_of_contexts_gives_what_is_left(
    loaded: LoadedModel, own: JsonlTask, data: st.DataObject
) -> None:
    known = [hash_context(row.context) for row in own.rows]
    out = data.draw(st.sets(st.sampled_from(known), max_size=ROWS - 1))
    samples, seed = data.draw(st.integers(1, ROWS)), data.draw(st.integers(0, 3))
    found = drawn(loaded, own, samples, ContextSet.of(out), seed)
    asked = list_context_hashes([found])
    assert len(asked) == len(set(asked)) == min(samples, ROWS - len(out))
    assert not set(asked) & out
    if not out:
        assert asked == list_context_hashes([drawn(loaded, own, samples, seed=seed)])


def test_a_task_without_a_fresh_context_is_refused(loaded: LoadedModel, own: JsonlTask) -> None:
    every = collect_contexts([drawn(loaded, own, ROWS)])
    message = r"task own: none of its 12 contexts of split all is fresh, .* chosen on all of them \(12 in all\)"
    with pytest.raises(UsageError, match=message):
        drawn(loaded, own, 4, every)


def test_problems_after_one_set_of_worked_examples_are_contexts_of_their_own(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(f'{{"question": "{n} bells?", "answer": "so #### {n}"}}\n' for n in range(1, 7)))
    task = Gsm8kTask(source=path)
    first = drawn(loaded, task, 3)
    used = collect_contexts([first])
    assert len(used.ids) == 3
    second = drawn(loaded, task, 6, used)
    assert {prompt.key for prompt in second.prompts} == set("012345") - {prompt.key for prompt in first.prompts}
    alone = drawn(loaded, task, 1, used)  # of one drawn alone nobody can tell that the others have its context
    assert alone.prompts[0].key not in {prompt.key for prompt in first.prompts}
