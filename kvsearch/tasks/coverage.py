"""How much of a task is asked: what evaluations and reports say of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """How much of a task is asked."""

    task: str
    category: str
    wanted: int  # contexts that the evaluation asked for
    found: int  # contexts that the task has
    contexts: int  # contexts with a usable question
    truncated: int  # contexts whose middle was cut out
    questions: int
    excluded: dict[str, int]  # questions left out, by reason
    used: int = 0  # contexts left out as something was fitted or chosen on them
    split: str | None = None  # part of the examples, of tasks that have parts
    shortest: int | None = None  # tokens of the shortest context, as asked
    longest: int | None = None
