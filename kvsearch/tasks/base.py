"""The Task seam: examples with a context, a question and answers, and a metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Query:
    """One question about a context, the answers that count as right, and how many tokens a reply may have."""

    question: str
    answers: tuple[str, ...]
    max_new_tokens: int = 64


@dataclass(frozen=True)
class Example:
    """A context and the questions asked of it after it was compressed (question-agnostic protocol)."""

    task: str
    key: str  # unique and stable, for paired statistics
    context: str
    queries: tuple[Query, ...]


class Task(Protocol):
    """A named source of examples with a metric in [0, 1]."""

    @property
    def name(self) -> str: ...

    @property
    def prompt(self) -> str:
        """How a question follows the context where the tokenizer has no chat template, with `{question}` in it."""
        ...

    def examples(self, samples: int, seed: int) -> Sequence[Example]:
        """The first `samples` examples of the split that `seed` names."""
        ...

    def score(self, reply: str, answers: Sequence[str]) -> float:
        """Quality of a reply, 0 to 1."""
        ...
