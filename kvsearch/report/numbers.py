"""How numbers are printed: scores in percent, intervals, how often one of two methods won, and what was asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsearch.runs.estimates import Difference, Estimate
    from kvsearch.selection.selection import QuestionCount
    from kvsearch.tasks.base import Coverage


def percent(share: float, digits: int = 2) -> str:
    """Write a share as percent, without the sign."""
    return f"{100 * share:.{digits}f}"


def chance_of(share: float) -> str:
    """Write how likely chance alone is, in three digits; a sampled test never shows that it is none."""
    return "<0.001" if share < 0.0005 else f"{share:.3f}"


def bounds(found: Estimate, form: str = ".2f", unit: float = 100) -> str:
    """Write the ends of an interval in a format, times `unit`, [low, high], or over how many contexts there is none."""
    if math.isnan(found.low):
        return f"[{counted(found.contexts or 0, 'context')}: no interval]"
    return f"[{unit * found.low:{form}}, {unit * found.high:{form}}]"


def interval(found: Estimate, form: str = ".2f", unit: float = 100, noun: str = "") -> str:
    """Write a mean with its interval in a format, times `unit`; a noun such as " points" goes between the two."""
    return f"{unit * found.mean:{form}}{noun} {bounds(found, form, unit)}"


def nats(found: Estimate, sign: str = "") -> str:
    """Write a loss in nats per token with its interval; `sign` "+" is for a difference."""
    return interval(found, f"{sign}.4f", unit=1)


def outcomes(found: Difference) -> str:
    """Write how many questions were won, tied and lost."""
    return f"{found.wins} / {found.ties} / {found.losses}"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s unless the number is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def asked_words(coverage: Sequence[Coverage]) -> str:
    """Say what was asked of some tasks; lengths and splits as far as they are known."""
    lengths = [length for task in coverage for length in (task.shortest, task.longest)]
    questions = sum(task.questions for task in coverage)
    words = _about(questions, sum(task.contexts for task in coverage), lengths)
    splits = dict.fromkeys(task.split for task in coverage if task.split is not None)
    return f"{words}, split {' and '.join(splits)}" if splits else words


def asked(count: QuestionCount) -> str:
    """Say how many questions about how many contexts were asked."""
    return _about(count.questions, count.contexts, (count.shortest, count.longest))


def _about(questions: int, contexts: int, lengths: Sequence[int | None]) -> str:
    words = f"{counted(questions, 'question')} about {counted(contexts, 'context')}"
    known = [length for length in lengths if length is not None]
    if not known:
        return words
    low = min(known)
    high = max(known)
    return f"{words} of {counted(low, 'token') if low == high else f'{low} to {high} tokens'}"
