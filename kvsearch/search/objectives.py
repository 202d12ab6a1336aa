"""What a search can be judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.search.settings import ObjectiveName


@dataclass(frozen=True)
class Objective:
    """One way to judge a candidate on a sample. `free_running`: on its own reply, else on a teacher-forced answer."""

    name: ObjectiveName
    description: str
    higher_is_better: bool = False
    free_running: bool = False
    needs_full: bool = False  # of every sample, what the full cache says


OBJECTIVES: Final[dict[str, Objective]] = {
    objective.name: objective
    for objective in (
        Objective("nll", "mean negative log-likelihood of the right answer's tokens, in nats"),
        Objective(
            "kl",
            "mean divergence KL(full cache || candidate) of the next-token distributions over the right answer's "
            "tokens, in nats",
            needs_full=True,
        ),
        Objective("metric", "the task's metric of the greedy reply, 0 to 1", higher_is_better=True, free_running=True),
    )
}


def find_objective(name: str) -> Objective:
    """Return the objective of that name; UsageError if there is none."""
    if name not in OBJECTIVES:
        raise UsageError(f"unknown objective {name!r}{suggest(name, get_args(ObjectiveName))}")
    return OBJECTIVES[name]
