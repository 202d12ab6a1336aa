"""Metrics of a reply against reference answers, in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence


def exact_match(reply: str, answers: Sequence[str]) -> float:
    """1 if the reply begins with one of the answers, word by word (what follows the answer is not judged)."""
    words = reply.split()
    return float(any(words[: len(answer.split())] == answer.split() for answer in answers))


def contains_any(reply: str, answers: Sequence[str]) -> float:
    """1 if any answer occurs in the reply, case-insensitive (RULER's string match, part)."""
    return float(any(answer.lower() in reply.lower() for answer in answers))


METRICS = {"exact": exact_match, "contains": contains_any}
