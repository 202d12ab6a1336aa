"""The synthetic language: documents of the right size whose questions their own evidence answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.synthetic import language as v
from kvsearch.tasks.synthetic.language import Document, Names, compose_document, make_code_facts
from kvsearch.tasks.synthetic.suite import EVIDENCE_SHARE, FACTS_AMONG_FACTS, FORMS, SUITES, SyntheticTask
from scripts.train_bundled import tokenizer
from tests.examples import fixed
from tests.tasks.solver import FACTS, Sentence, answer, evidence, sentences

LENGTHS = (512, 1024, 2048)
few = fixed(15)
tasks = pytest.mark.parametrize("task", FORMS)
seeds = st.integers(0, 2**32)


def right_answer(task: str, words: Sequence[str], prompt: Sequence[str]) -> Sentence:
    """What the evidence says; qa_2 wants it without the full stop."""
    found = answer(words, prompt)
    return found[:-1] if task == "qa_2" else found


def words(text: str) -> Sentence:
    return tuple(text.split())


def keys_of(told: list[Sentence]) -> list[Sentence]:
    """What each fact is about."""
    return [s[: 3 if s[0] == "item" else 2] for s in told if s[0] in ("code", "item", "set")]


def assert_sound(document: Document, length: int) -> None:
    """What holds for every document."""
    assert document.words[0] == v.BOS
    assert len(document.words) <= length
    assert set(document.words) <= set(v.WORDS)
    told = sentences(document.words)
    assert max(Counter(keys_of(told)).values(), default=1) == 1
    for place, mention in enumerate(told):
        if mention[0] == "recall":
            earlier = [s for s in told[:place] if s[:3] == mention[1:4]]
            assert len(earlier) == 1, f"{mention} comes before its fact"
            assert set(mention[1:-1]) <= set(earlier[0]) or mention[1] == "set"
    assert {s[0] for s in told} <= {*FACTS, "recall", "the"}


@tasks
@few
@given(seed=seeds, length=st.sampled_from(LENGTHS))
def test_documents_of_the_suite(task: str, seed: int, length: int) -> None:
    document = SyntheticTask(task, length).document(random.Random(seed))
    assert_sound(document, length)
    assert len(document.words) > length - 9 - 1  # one more sentence would not fit
    assert 0 < evidence(document.words) <= FORMS[task].share * length
    assert evidence(document.words) <= EVIDENCE_SHARE * len(document.words) or task in ("multikey_2", "multikey_3")
    assert document.questions
    for question in document.questions:
        assert words(question.answers[0]) == right_answer(task, document.words, words(question.question))
    assert len({question.question for question in document.questions}) == len(document.questions)


@few
@given(seed=seeds, tail=st.integers(1, 3))
def test_a_mention_at_the_end_never_precedes_a_fact_at_the_end(seed: int, tail: int) -> None:
    """With hardly any filler the facts are the last sentences."""
    rng = random.Random(seed)
    document = compose_document(rng, 30, [make_code_facts(rng, Names(rng), 3)], 1, tail)
    assert_sound(document, 200)


@tasks
def test_examples(task: str) -> None:
    """Four questions a context at most, with room for the answer and no more; the context has no <bos> of its own."""
    made, state = SyntheticTask(task, 1024), random.getstate()
    for example in made.examples(5, 0):
        assert example.task == task
        assert v.BOS not in example.context
        assert 1 <= len(example.queries) <= 4
        assert len(tokenizer()(example.context)["input_ids"]) <= 1024
        for query in example.queries:
            (right,) = query.answers
            assert right.split() == list(right_answer(task, example.context.split(), query.question.split()))
            assert query.max_new_tokens == len(right.split())
            assert made.score(right, query) == 1.0
            assert made.score("the " + right, query) == 0.0
    assert random.getstate() == state


# --- what RULER's forms hide, and in what -----------------------------------------------------------------------------


def made_for(task: str, seed: int, length: int) -> Document:
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
@given(seed=seeds, length=st.sampled_from(LENGTHS))
def test_one_long_value_told_at_once(seed: int, length: int) -> None:
    document = made_for("single_3", seed, length)
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
@given(seed=seeds, length=st.sampled_from(LENGTHS))
def test_long_values_in_a_haystack_made_of_facts(seed: int, length: int) -> None:
    """At 1,024 words and more all keys and all chains are told."""
    document = made_for("multikey_3", seed, length)
    count = kinds(document)
    assert evidence(document.words) > (0.88 * 512 if length == 512 else 549)
    assert asked(document) == {"item"}
    assert len(document.questions) == 8 == count["item"] // 3
    assert count["set"] == 30
    assert count["code"] == (38 if length == 512 else 56)


@few
@given(seed=seeds, length=st.sampled_from(LENGTHS))
def test_paragraphs_are_asked_in_one_and_in_two_hops(seed: int, length: int) -> None:
    one, two = made_for("qa_1", seed, length), made_for("qa_2", seed, length)
    assert asked(one) == {"code"}
    assert kinds(one)["set"] == 2
    assert asked(two) == {"set"}
    assert kinds(two)["set"] == 4
    assert kinds(two)["code"] >= 1
    links = {s[1]: s[3] for s in sentences(two.words) if s[0] == "set"}
    for question in two.questions:
        middle = links[question.question.split()[2]]
        assert question.answers == (f"{middle} set {middle} = {links[middle]}",)
