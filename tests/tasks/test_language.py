"""The synthetic language: documents of the right size whose questions their own evidence answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.synthetic import language as v
from kvsearch.tasks.synthetic.language import (
    Document,
    Names,
    compose_document,
    make_code_facts,
)
from kvsearch.tasks.synthetic.suite import EVIDENCE_SHARE, FORMS, SyntheticTask
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
