"""Common words and coded words: the answers are the most frequent ones, without doubt."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.base import Example
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.frequency import LEAST_CODED, compute_word_counts
from tests.combinations import in_turn
from tests.tasks.ruler.helpers import bpe, whole, words


def lists(example: Example) -> list[list[str]]:
    """The words of the numbered lists of a text: the solved one, its answer, and the one that is asked about."""
    solved, asked = example.context.split("\n\n")
    found = []
    for text in (*solved.split("Question: Which"), asked):
        numbered = re.findall(r"(\d+)\. ([a-z]+)", text)
        assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
        found.append([word for _, word in numbered])
    return found


@pytest.mark.parametrize(
    ("length", "common", "rare", "solved_common", "solved_rare"), [(4095, 6, 1, 3, 1), (4096, 30, 3, 10, 3)]
)
def test_how_often_words_come(length: int, common: int, rare: int, solved_common: int, solved_rare: int) -> None:
    """Even a reader who counts letters anywhere, the solved list included, finds the answers and no others."""
    for example in RulerTask("cwe", length).examples(3, 0, words):
        (query,) = example.queries
        solved, answer, asked = lists(example)
        told, shown = Counter(asked), Counter(solved)
        assert sorted(query.answers) == sorted(word for word, times in told.items() if times == common)
        assert set(told.values()) == {common, rare}
        assert len(query.answers) == len(set(query.answers)) == 10
        assert sorted(answer) == sorted(word for word, times in shown.items() if times == solved_common)
        assert set(shown.values()) == {solved_common, solved_rare}
        assert len(shown) == (40 if length >= 4096 else 20)
        assert {word for word, _ in Counter(solved + answer + asked).most_common(10)} == set(query.answers)
        assert not set(solved) & set(asked)
        for word in query.answers:
            assert whole(example).count(word) == asked.count(word)


@pytest.mark.parametrize(
    ("n", "counts"),
    [
        (1, []),
        (2, [1]),
        (74, [44, 11, 4, 2, 1, 1]),  # 74 / 1.6449 = 44.99, over 4, 9, 16, 25 and 36
        (1000, [607, 151, 67, 37, 24, 16, 12, 9, 7, 6, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_counts_of_coded_words(n: int, counts: list[int]) -> None:
    assert compute_word_counts(n) == counts


@given(st.integers(0, 10**6))
def test_the_third_and_the_fourth_word_differ(n: int) -> None:
    counts = compute_word_counts(n)
    assert all(times >= 1 for times in counts)
    assert counts == sorted(counts, reverse=True)
    if n >= LEAST_CODED:
        assert counts[0] > counts[1] > counts[2] > counts[3] > (*counts[4:], 0)[0]


@in_turn(length=[512, 8192], count=[words, bpe()])
def test_coded_words(length: int, count: object) -> None:
    for example in RulerTask("fwe", length).examples(4, 0, count):  # type: ignore[arg-type]
        (query,) = example.queries
        intro, text = example.context.split("\n")
        told = Counter(text.split())
        dots = told.pop("...")
        assert all(re.fullmatch("[a-z]{6}", word) for word in told)
        (*top, fourth) = told.most_common(4)
        assert tuple(word for word, _ in top) == query.answers
        assert top[-1][1] > fourth[1]
        assert dots > 3 * top[0][1]
        for word in query.answers:
            assert whole(example).count(word) == told[word]
            assert word not in intro
