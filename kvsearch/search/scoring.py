"""What candidates are worth: from the ledger where they are known, else measured and written down before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsearch.search.executors.base import Executor, Floats, Ints, Job, Outcome, Result, candidate_key
from kvsearch.search.executors.population import evaluate_all
from kvsearch.search.ledger import Ledger
from kvsearch.search.objectives import find_objective
from kvsearch.search.records import Line
from kvsearch.search.settings import Limits

DIGITS = 9  # of a value that are told: what differs by less is rounding

Minibatch = tuple[int, ...] | None


class LimitReachedError(Exception):
    """The search may not measure any more; the message says which limit it is."""


@dataclass
class Scoring:
    """Means over samples, to be minimised (a metric's with its sign turned), NaN where a candidate failed.

    `tokens` is how many tokens one candidate takes on some samples (None: all), which makes a limit of them exact.
    """

    executor: Executor
    ledger: Ledger
    objective: str
    job: int
    limits: Limits
    tokens: Callable[[Minibatch], int]
    measured: int = field(init=False, default=0)  # in this session

    def __call__(self, candidates: Sequence[Ints], since: Line | None, samples: Minibatch = None) -> list[float]:
        """The value of each candidate [L, Hkv]; `since` is the line after which the generation began.

        Raises:
            LimitReachedError: not all may be measured; those that could be are in the ledger.
            EnvironmentFault, IncompatibleError: see `evaluate_all` and `Ledger.keep`.
        """
        keys = [candidate_key(candidate, self.objective, samples) for candidate in candidates]
        new = self._new(candidates, keys, self.ledger.results(since))
        known = self.ledger.results()
        missing = [key for key in new if key not in known]
        left = self._left(samples)
        if missing and left <= 0:
            raise LimitReachedError(self._limit(samples))
        if len(missing) > left:
            allowed = set(missing[:left])
            new = {key: table for key, table in new.items() if key in known or key in allowed}
        tables = list(new.values())
        jobs = [
            Job(first, tuple(tables[first : first + self.job]), samples, self.objective)
            for first in range(0, len(tables), self.job)
        ]
        evaluate_all(self.executor, jobs, self._keep, known, max(len(candidates), 1))
        if len(missing) > left:
            raise LimitReachedError(self._limit(samples))
        found = self.ledger.results()
        return [self._value(found.get(key)) for key in keys]

    def values(self, candidate: Ints, samples: Minibatch = None) -> Floats | None:
        """Per sample, as measured, [S]; None if it is not known."""
        found = self.ledger.results().get(candidate_key(candidate, self.objective, samples))
        return None if found is None or found.kind != "ok" else found.values

    def _new(self, candidates: Sequence[Ints], keys: Sequence[str], known: dict[str, Result]) -> dict[str, Ints]:
        """Different candidates that were not known when the generation began, by key, in order."""
        return {key: table for key, table in zip(keys, candidates, strict=True) if key not in known}

    def _value(self, found: Result | None) -> float:
        if found is None or found.kind != "ok" or found.values is None:
            return float("nan")
        mean = round(float(np.mean(found.values)), DIGITS)
        return -mean if find_objective(self.objective).higher_is_better else mean

    def _keep(self, job: Job, outcome: Outcome) -> None:
        self.ledger.keep(job, outcome)
        self.measured += len(job.candidates)
        if self._over_time():
            raise LimitReachedError(self._limit(job.samples))

    def _left(self, samples: Minibatch) -> int:
        """How many more candidates may be measured."""
        spent, limits = self.ledger.spent, self.limits
        left = 2**31
        if limits.evaluations is not None:
            left = min(left, limits.evaluations - spent.evaluations)
        if limits.tokens is not None:
            left = min(left, (limits.tokens - spent.tokens) // max(1, self.tokens(samples)))
        return 0 if self._over_time() else max(left, 0)

    def _over_time(self) -> bool:
        return self.limits.seconds is not None and self.ledger.spent.seconds >= self.limits.seconds

    def _limit(self, samples: Minibatch) -> str:
        spent, limits = self.ledger.spent, self.limits
        if limits.evaluations is not None and spent.evaluations >= limits.evaluations:
            return f"{spent.evaluations} candidates were evaluated, as many as allowed"
        if limits.tokens is not None and spent.tokens + self.tokens(samples) > limits.tokens:
            return f"{spent.tokens} tokens were read, and one more candidate would exceed {limits.tokens}"
        return f"{spent.seconds:.0f} seconds were spent, as many as allowed"
