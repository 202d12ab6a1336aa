"""What was asked, as captions of tables say it: questions, contexts, their lengths, and the split."""

from __future__ import annotations

from collections.abc import Sequence

from kvsearch.report.numbers import counted
from kvsearch.tasks.coverage import Coverage


def asked_words(coverage: Sequence[Coverage]) -> str:
    """Say what was asked of some tasks; lengths and splits as far as they are known."""
    questions, contexts = sum(one.questions for one in coverage), sum(one.contexts for one in coverage)
    known = [length for one in coverage for length in (one.shortest, one.longest) if length is not None]
    splits = dict.fromkeys(one.split for one in coverage if one.split is not None)
    named = [f"split {' and '.join(splits)}"] * bool(splits)
    return ", ".join([about(questions, contexts, known), *named])


def about(questions: int, contexts: int, lengths: Sequence[int] = ()) -> str:
    """Say how many questions are about how many contexts, among whose `lengths` are the shortest and the longest."""
    words = f"{counted(questions, 'question')} about {counted(contexts, 'context')}"
    if not lengths:
        return words
    low, high = min(lengths), max(lengths)
    return f"{words} of {counted(low, 'token') if low == high else f'{low} to {high} tokens'}"
