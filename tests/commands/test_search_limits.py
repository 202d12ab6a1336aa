"""How many contexts and questions the search of `kvsearch run` takes of those that it may have."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvsearch.commands.searching import limit_search


@dataclass(frozen=True)
class EqualContexts:
    """A split of `count` contexts of so many tokens, each with questions of so many tokens with their replies."""

    count: int
    tokens: int
    asked: int
    asked_tokens: int
    samples: int = 9
    questions: int | None = None

    def encode(self, loaded: Any) -> list[Any]:
        question = SimpleNamespace(ids=[0] * (self.asked_tokens - 5), right=[0] * 5)
        prompt = SimpleNamespace(context=[0] * self.tokens, questions=[question] * self.asked)
        return [SimpleNamespace(prompts=[prompt] * self.count)]


@pytest.mark.parametrize(
    ("contexts", "samples", "questions"),
    [
        (EqualContexts(count=27, tokens=150, asked=1, asked_tokens=50), 9, None),  # little enough to read
        # 16,000 tokens of prompts are 17 contexts: 6 of 9 for each task
        (EqualContexts(count=27, tokens=930, asked=1, asked_tokens=50), 6, 2),
        # 1,600 tokens are 80 questions: two about each context
        (EqualContexts(count=40, tokens=150, asked=10, asked_tokens=20), 9, 2),
        # long contexts: 16 are left, of 32, and some of all tasks
        (EqualContexts(count=32, tokens=32_000, asked=1, asked_tokens=10), 5, 10),
    ],
)
def test_fewer_questions_then_fewer_contexts(contexts: Any, samples: int, questions: int | None) -> None:
    limited = limit_search(contexts, loaded=SimpleNamespace())  # type: ignore[arg-type]
    assert (limited.samples, limited.questions) == (samples, questions)
