"""How many contexts and questions the search of `kvsearch run` takes of those that it may have."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvsearch.commands.searching import limit_search


@dataclass(frozen=True)
class EqualContexts:
    """A split of `count` contexts, each with questions of so many tokens with their replies."""

    count: int
    asked: int
    asked_tokens: int
    samples: int = 9
    questions: int | None = None

    def encode(self, loaded: Any) -> list[Any]:
        question = SimpleNamespace(ids=[0] * (self.asked_tokens - 5), right=[0] * 5)
        prompt = SimpleNamespace(questions=[question] * self.asked)
        return [SimpleNamespace(prompts=[prompt] * self.count)]


@pytest.mark.parametrize(
    ("contexts", "samples", "questions"),
    [
        (EqualContexts(count=27, asked=1, asked_tokens=50), 9, None),  # little enough to read
        # 1,600 tokens are 80 questions: two about each context
        (EqualContexts(count=40, asked=10, asked_tokens=20), 9, 2),
        # 20 questions, each about another context: half of all
        (EqualContexts(count=40, asked=10, asked_tokens=80), 5, 1),
        (EqualContexts(count=40, asked=1, asked_tokens=800), 4, 1),  # two questions, but 16 contexts at least
    ],
)
def test_fewer_questions_then_fewer_contexts(contexts: Any, samples: int, questions: int | None) -> None:
    limited = limit_search(contexts, loaded=SimpleNamespace())  # type: ignore[arg-type]
    assert (limited.samples, limited.questions) == (samples, questions)
