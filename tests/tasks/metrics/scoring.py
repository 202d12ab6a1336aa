"""Score a reply by a metric's name."""

from __future__ import annotations

from kvsearch.tasks.base import Query
from kvsearch.tasks.metrics import METRICS


def score(metric: str, reply: str, answers: str | tuple[str, ...], options: tuple[str, ...] = ()) -> float:
    """The score of a reply against one answer or several."""
    listed = (answers,) if isinstance(answers, str) else answers
    return METRICS[metric](reply, Query("a question", listed, options=options))
