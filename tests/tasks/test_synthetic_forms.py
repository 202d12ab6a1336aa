"""RULER's forms in the synthetic language: what each of them hides, and in what."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.synthetic.language import (
    Document,
)
from kvsearch.tasks.synthetic.suite import FACTS_AMONG_FACTS, FORMS, SUITES, SyntheticTask
from tests.examples import fixed
from tests.tasks.solver import evidence, sentences

few = fixed(10)
seeds = st.integers(0, 2**32)
lengths = st.sampled_from((512, 1024, 2048))


def made(task: str, seed: int, length: int) -> Document:
    return SyntheticTask(task, length).document(random.Random(seed))


def kinds(document: Document) -> Counter[str]:
    """How many sentences there are of each kind, filler under "the"."""
    return Counter(sentence[0] for sentence in sentences(document.words))


def asked(document: Document) -> set[str]:
    return {question.question.split()[1] for question in document.questions}


def test_what_cannot_be_told_from_its_haystack_is_a_category_and_in_no_sparse_suite() -> None:
    apart = {name for name in FORMS if SyntheticTask(name).category == FACTS_AMONG_FACTS}
    assert apart == {"multikey_2", "multikey_3"}
    assert SUITES["sparse"] == tuple(name for name in SUITES["ruler"] if name not in apart)
    assert {SyntheticTask(name).category for name in SUITES["sparse"]} == {"bundled language"}


@few
@given(seed=seeds, length=lengths)
def test_one_long_value_told_at_once(seed: int, length: int) -> None:
    document = made("single_3", seed, length)
    assert kinds(document)["item"] == 3
    (question,) = document.questions
    told = " ".join(document.words)
    answer = question.answers[0].split()
    assert f"item {' '.join(answer[:2])}" not in told  # the question, not the answer, has the key
    key = question.question.split()[2]
    whole = " . item ".join(" ".join((key, *answer[at : at + 2])) for at in (0, 3, 6))
    assert f"item {whole} ." in told
    assert len(answer) == 9


@few
@given(seed=seeds, length=lengths)
def test_long_values_in_a_haystack_made_of_facts(seed: int, length: int) -> None:
    """At 1,024 words and more all keys and all chains are told."""
    document = made("multikey_3", seed, length)
    count = kinds(document)
    assert evidence(document.words) > (0.88 * 512 if length == 512 else 549)
    assert asked(document) == {"item"}
    assert len(document.questions) == 8 == count["item"] // 3
    assert count["set"] == 30
    assert count["code"] == (38 if length == 512 else 56)


@few
@given(seed=seeds, length=lengths)
def test_paragraphs_are_asked_in_one_and_in_two_hops(seed: int, length: int) -> None:
    one, two = made("qa_1", seed, length), made("qa_2", seed, length)
    assert asked(one) == {"code"}
    assert kinds(one)["set"] == 2
    assert asked(two) == {"set"}
    assert kinds(two)["set"] == 4
    assert kinds(two)["code"] >= 1
    links = {s[1]: s[3] for s in sentences(two.words) if s[0] == "set"}
    for question in two.questions:
        middle = links[question.question.split()[2]]
        assert question.answers == (f"{middle} set {middle} = {links[middle]}",)
