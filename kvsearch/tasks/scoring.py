"""The score of one reply, with whatever is wrong named by its question."""

from __future__ import annotations

from kvsearch.errors import EnvironmentFault, InternalError, UsageError
from kvsearch.tasks.base import Query, Task

ROUNDING = 1e-9  # how far the arithmetic of a metric may lead out of [0, 1]


def score(task: Task, key: str, number: int, query: Query, reply: str) -> float:
    """Return the score of a reply to question `number` of the example `key`, in [0, 1].

    Raises:
        UsageError: the metric cannot judge replies to this question, or gives something that is no score.
        EnvironmentFault: a package that the metric needs is missing.
    """
    place = f"task {task.name}, example {key}, question {number}"
    try:
        value = task.score(reply, query)
    except (EnvironmentFault, InternalError, MemoryError):
        raise  # not about this question
    except Exception as error:
        reason = " ".join(str(error).split()) if isinstance(error, UsageError) else _described(error)
        raise UsageError(f"{place}: {reason}") from error
    if not -ROUNDING <= value <= 1 + ROUNDING:
        raise UsageError(f"{place}: the metric gives {value}, a score must be in [0, 1]")
    return value


def is_right(value: float) -> bool:
    """Tell whether a reply of that score counts as right: it has the full score."""
    return value >= 1 - ROUNDING


def _described(error: Exception) -> str:
    """Describe an error that was not written for people: a metric of the user's own may raise anything."""
    return " ".join(f"the metric fails with {type(error).__name__}: {error}".split())
