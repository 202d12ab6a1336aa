"""Tasks in token ids: contexts cut in the middle, questions that cannot be asked, and the count of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.plan.origin import hash_context
from kvsearch.tasks.base import Coverage, Example, Query, Task
from kvsearch.tasks.encode import (
    NO_ANSWER,
    NO_CONTEXT,
    NO_QUESTION,
    compute_token_limit,
    cut_middle,
    encode,
    encode_tasks,
    name_contexts,
)
from kvsearch.tasks.niah import NiahTask
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.synthetic.language import WORDS
from kvsearch.tasks.synthetic.suite import SyntheticTask
from tests import tiny

WORD = WORDS[20:60]  # 40 words that say nothing
TEXT = " ".join(WORD)


def example(context: str = TEXT, *queries: Query, key: str = "k") -> Example:
    return Example("t", key, context, queries or (Query("? vote", ("anchor",), 5),))


def task(*rows: Example, name: str = "t", **changes: object) -> tiny.Listed:
    return replace(tiny.Listed(name, rows), **changes)


def words(ids: torch.Tensor) -> list[str]:
    assert ids.dtype == torch.int64
    return [WORDS[token] for token in ids.tolist()]


@given(st.integers(1, 60), st.integers(0, 10), st.integers(2, 70))
def test_head_and_tail_stay(length: int, lead: int, more: int) -> None:
    lead = min(lead, length)
    room = lead + more
    kept = cut_middle(torch.arange(length), lead, room).tolist()
    assert len(kept) == min(length, room)
    assert kept == sorted(set(kept))
    if length > room:
        gaps = [at for at in range(1, len(kept)) if kept[at] != kept[at - 1] + 1]
        assert len(gaps) == 1  # one piece is missing
        head, tail = gaps[0] - lead, len(kept) - gaps[0]
        assert head - tail in (0, 1)
        assert (kept[0], kept[-1]) == (0, length - 1)


def test_most_tokens() -> None:
    model = tiny.loaded(max_position_embeddings=300).model
    assert compute_token_limit(model) == 300
    assert compute_token_limit(model, 200) == 200
    assert compute_token_limit(model, 400) == 300  # the model's own limit cannot be raised
    model.config.max_position_embeddings = 0  # unknown
    assert compute_token_limit(model) is None
    assert compute_token_limit(model, 400) == 400


@pytest.mark.parametrize(
    ("limit", "kept"),
    # <bos>, then what 1 + 40 tokens of context, 2 of the question and 5 of the reply leave room for
    [(48, 40), (47, 39), (10, 2)],
)
def test_contexts_are_cut_in_the_middle(limit: int, kept: int) -> None:
    made = encode(tiny.tokenizer(), task(example()), [example()], None, limit)
    (prompt,) = made.prompts
    head, tail = (kept + 1) // 2, kept // 2
    assert words(prompt.context) == ["<bos>", *WORD[:head], *WORD[40 - tail :]]
    assert words(prompt.questions[0].ids) == ["?", "vote"]
    assert prompt.truncated == (kept < 40)
    assert made.coverage.truncated == int(kept < 40)


def test_the_cut_leaves_the_head_of_a_chat_template_alone() -> None:
    made = encode(tiny.chat_tokenizer(), task(example(), chat=True), [example()], None, 20)
    # <bos> recall [context] ? vote . mark = and five tokens of reply
    assert words(made.prompts[0].context) == ["<bos>", "recall", *WORD[:4], *WORD[-4:]]


def test_the_longest_question_decides_for_all_of_a_context() -> None:
    queries = (
        Query("? vote", ("anchor",), 5),
        Query("? code amber", ("anchor",), 3, " recall the"),
        Query("?", ("b",)),
    )
    made = encode(tiny.tokenizer(), task(), [example(TEXT, *queries)], None, 30 + 65)
    (prompt,) = made.prompts
    assert [question.number for question in prompt.questions] == [0, 1, 2]
    assert len(prompt.context) == 30  # ? and a reply of 64
    assert words(prompt.with_question(prompt.questions[1])) == [
        *words(prompt.context), "?", "code", "amber", "recall", "the",
    ]  # fmt: skip


def test_a_question_that_leaves_no_room() -> None:
    with pytest.raises(IncompatibleError, match=r"task t, example k, question 0: 2 tokens .* within 9 tokens"):
        encode(tiny.tokenizer(), task(), [example()], None, 9)


def silent_tokenizer() -> object:
    """Without <bos>, so that a text may have no token."""
    made = tiny.tokenizer()
    made.backend_tokenizer.post_processor = None
    return made


def test_exclusions_are_counted() -> None:
    good, mute, unanswerable = (
        Query("? vote", ("anchor", "bell")),
        Query(" ", ("anchor",)),
        Query("? vote", ("", " ", "\u200b")),
    )
    rows = [
        example(TEXT, good, mute, good, key="a"),
        example("  ", good, good, key="b"),
        example(TEXT, unanswerable, mute, key="c"),
        example(TEXT, unanswerable, good, key="d"),
    ]
    made = encode(silent_tokenizer(), task(), rows, 9)
    assert made.coverage == Coverage(
        "t", "listed", 9, 4, 2, 0, 3, {NO_ANSWER: 2, NO_CONTEXT: 2, NO_QUESTION: 2}, shortest=40, longest=40
    )  # fmt: skip
    assert [(prompt.key, [q.number for q in prompt.questions]) for prompt in made.prompts] == [
        ("a", [0, 2]),
        ("d", [1]),
    ]


def test_keys_of_one_text_have_one_context() -> None:
    other = TEXT + " " + TEXT
    made = encode(tiny.tokenizer(), task(), [example(TEXT, key="a"), example(other, key="b"), example(TEXT, key="c")])
    assert made.contexts["a"] == made.contexts["c"] == hash_context(TEXT) != made.contexts["b"]
    assert (made.distinct, made.coverage.contexts) == (2, 3)
    assert name_contexts([made]) == {("t", key): name for key, name in made.contexts.items()}


def test_a_task_of_which_nothing_is_left() -> None:
    with pytest.raises(UsageError, match=r"task t has no usable question \(empty answer: 1\)"):
        encode(tiny.tokenizer(), task(), [example(TEXT, Query("? vote", ("",)))])
    with pytest.raises(UsageError, match=r"task t has no usable question \(it has no examples\)"):
        encode(tiny.tokenizer(), task(), [])


@pytest.mark.parametrize(
    ("made", "longest"),
    [
        (SyntheticTask("single", 600), 600),
        (RulerTask("vt", 513), 513),
        (NiahTask(lengths=(100, 2000), depths=(50,)), 2000),
    ],
)
def test_generated_contexts_are_never_cut(made: Task, longest: int) -> None:
    model = tiny.loaded()  # takes 512 tokens
    words = f"task {made.name} makes prompts of {longest} tokens, "
    with pytest.raises(UsageError, match=f"^{words}tiny takes 512: lower --length$"):
        encode_tasks(model, [made], 1)
    with pytest.raises(UsageError, match=f"^{words}tiny takes 512: lower --length$"):
        encode_tasks(model, [made], 1, max_length=900)  # does not raise what the model takes
    with pytest.raises(UsageError, match=f"^{words}--max-length allows 400: lower --length$"):
        encode_tasks(model, [made], 1, max_length=400)
