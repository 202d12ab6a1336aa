"""Splits that share nothing, and draws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.tasks.splits import ALL, SHARES, SPLITS, Shares, check_split, draw, part


def parts(items: list[int], shares: Shares = SHARES) -> dict[str, list[int]]:
    found = {}
    for split in SPLITS:
        try:
            found[split] = part(items, split, lambda item: item, "mine", shares)
        except UsageError as error:
            assert "is empty" in str(error)
            found[split] = []
    return found


def test_shares_of_a_hundred() -> None:
    found = parts(list(range(100)))
    assert {split: len(items) for split, items in found.items()} == {"train": 20, "select": 20, "report": 60}
    assert found["train"] != list(range(20))  # shuffled before they are cut
    assert all(items == sorted(items) for items in found.values())
    assert part([3, 1, 2], ALL, lambda item: item, "mine") == [3, 1, 2]


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
    found = [part(items, split, lambda item: item[0], "mine") for split in SPLITS]
    groups = [{item[0] for item in some} for some in found]
    assert [len(some) for some in groups] == [2, 2, 6]
    assert set.union(*groups) == set(range(10))
    assert sum(map(len, found)) == len(items)


def test_an_empty_split() -> None:
    with pytest.raises(UsageError, match=r"split 'train' of mine is empty: 1 contexts at shares \(0.2, 0.2, 0.6\)"):
        part(["one"], "train", lambda item: item, "mine")


def test_a_split_that_is_none() -> None:
    known = r"unknown split 'trian'; did you mean 'train'\? \(known: train, select, report, all\)"
    with pytest.raises(UsageError, match=known):
        check_split("trian")


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5))
def test_draws_are_nested_and_without_replacement(few: int, more: int, seed: int) -> None:
    items = list(range(25))
    some, all_of_them = draw(items, min(few, more), seed), draw(items, max(few, more), seed)
    assert len(some) == min(few, more, 25)
    assert len(set(some)) == len(some)
    assert set(some) <= set(all_of_them)
