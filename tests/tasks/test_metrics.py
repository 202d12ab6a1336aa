"""Metrics in [0, 1]."""

from __future__ import annotations

import pytest

from kvsearch.tasks.metrics import METRICS


@pytest.mark.parametrize(
    ("reply", "answers", "score"),
    [
        ("red fox .", ["red fox ."], 1),
        ("  red\nfox . and more", ["red fox ."], 1),
        ("red foxes", ["red fox"], 0),
        ("the red fox", ["red fox"], 0),
        ("Red fox", ["red fox"], 0),
        ("red", ["red fox"], 0),
        ("", ["red"], 0),
        ("blue cat", ["red fox", "blue"], 1),
    ],
)
def test_exact_match(reply: str, answers: list[str], score: float) -> None:
    assert METRICS["exact"](reply, answers) == score


@pytest.mark.parametrize(
    ("reply", "answers", "score"),
    [
        ("It was the Red FOX.", ["red fox"], 1),
        ("It was red. A fox", ["red fox"], 0),
        ("a cat", ["dog", "CAT"], 1),
        ("", ["dog"], 0),
    ],
)
def test_contains(reply: str, answers: list[str], score: float) -> None:
    assert METRICS["contains"](reply, answers) == score
