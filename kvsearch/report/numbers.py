"""Format numbers for tables and messages: percent, intervals, wins and losses, counts of questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsearch.runs.estimates import Difference, Estimate
    from kvsearch.selection.records import QuestionCount
    from kvsearch.tasks.base import Coverage


def format_percent(share: float, digits: int = 2) -> str:
    """Write a share as percent, without the sign."""
    return f"{100 * share:.{digits}f}"


def format_chance(share: float) -> str:
    """Format a p-value in three digits; a sampled test never shows a p-value of zero."""
    return "<0.001" if share < 0.0005 else f"{share:.3f}"


def format_bounds(estimate: Estimate, form: str = ".2f", unit: float = 100) -> str:
    """Write the ends of an interval in a format, times `unit`, [low, high], or over how many contexts there is none."""
    if math.isnan(estimate.low):
        return f"[{pluralize(estimate.contexts or 0, 'context')}: no interval]"
    return f"[{unit * estimate.low:{form}}, {unit * estimate.high:{form}}]"


def format_interval(estimate: Estimate, form: str = ".2f", unit: float = 100, noun: str = "") -> str:
    """Write a mean with its interval in a format, times `unit`; a noun such as " points" goes between the two."""
    return f"{unit * estimate.mean:{form}}{noun} {format_bounds(estimate, form, unit)}"


def format_nats(estimate: Estimate, sign: str = "") -> str:
    """Write a loss in nats per token with its interval; `sign` "+" is for a difference."""
    return format_interval(estimate, f"{sign}.4f", unit=1)


def format_outcomes(difference: Difference) -> str:
    """Write how many questions were won, tied and lost."""
    return f"{difference.wins} / {difference.ties} / {difference.losses}"


def pluralize(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s unless the number is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_coverage(coverage: Sequence[Coverage]) -> str:
    """Describe the evaluated questions of some tasks, with lengths and splits where known."""
    lengths = [length for task in coverage for length in (task.shortest, task.longest)]
    questions = sum(task.questions for task in coverage)
    text = _describe_counts(questions, sum(task.contexts for task in coverage), lengths)
    splits = dict.fromkeys(task.split for task in coverage if task.split is not None)
    return f"{text}, split {' and '.join(splits)}" if splits else text


def describe_questions(count: QuestionCount) -> str:
    """Format the number of evaluated questions and contexts."""
    return _describe_counts(count.questions, count.contexts, (count.shortest, count.longest))


def _describe_counts(questions: int, contexts: int, lengths: Sequence[int | None]) -> str:
    text = f"{pluralize(questions, 'question')} about {pluralize(contexts, 'context')}"
    known = [length for length in lengths if length is not None]
    if not known:
        return text
    low = min(known)
    high = max(known)
    return f"{text} of {pluralize(low, 'token') if low == high else f'{low} to {high} tokens'}"
