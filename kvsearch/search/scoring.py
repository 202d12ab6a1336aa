"""What candidates are worth: from the ledger where they are known, else measured and written down before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.search.candidates import Minibatch
from kvsearch.search.jobs import Executor, Job, JobOutcome, Result, candidate_key
from kvsearch.search.ledger import SearchLedger
from kvsearch.search.objectives import find_objective
from kvsearch.search.population import evaluate_all
from kvsearch.search.settings import SearchLimits

DIGITS = 9  # of a value that are told: what differs by less is rounding


class LimitReachedError(Exception):
    """The search may not measure any more; the message says which limit it is."""


@dataclass
class Scoring:
    """Means over samples, to be minimised (a metric's with its sign turned), NaN where a candidate failed.

    `tokens` is how many tokens one candidate takes at most on some samples (None: all), so that no limit is exceeded.
    """

    executor: Executor
    ledger: SearchLedger
    objective: str
    job: int
    limits: SearchLimits
    tokens: Callable[[Minibatch], int]

    def __call__(self, candidates: Sequence[Ints], since: int, samples: Minibatch = None) -> list[float]:
        """Return the value of each candidate [L, Hkv]; `since` is the number of the line that begins the generation.

        Raises:
            LimitReachedError: not all may be measured; those that could be are in the ledger.
            EnvironmentFault, IncompatibleError: see `evaluate_all` and `SearchLedger.keep`.
        """
        keys = [candidate_key(candidate, self.objective, samples) for candidate in candidates]
        before, known = self.ledger.results(since), self.ledger.results()
        # What was measured since then stays among the jobs: the parts that are left are then the same as before.
        new = {key: table for key, table in zip(keys, candidates, strict=True) if key not in before}
        missing = [key for key in new if key not in known]
        allowed = missing[: self._left(samples)]
        if allowed:
            chosen = [table for key, table in new.items() if key in known or key in allowed]
            evaluate_all(self.executor, self._jobs(chosen, samples), self._keep, known, len(candidates))
        if len(allowed) < len(missing):
            raise LimitReachedError(self._limit(samples))
        return self.known(candidates, samples)

    def known(self, candidates: Sequence[Ints], samples: Minibatch = None) -> list[float]:
        """Return what the ledger says of candidates, NaN where it says nothing."""
        found = self.ledger.results()
        return [self._value(found.get(candidate_key(one, self.objective, samples))) for one in candidates]

    def _jobs(self, tables: Sequence[Ints], samples: Minibatch) -> list[Job]:
        """Make jobs of about equal size, so that several workers have about as much to do."""
        count = math.ceil(len(tables) / self.job)
        ends = [len(tables) * number // count for number in range(count + 1)]
        return [
            Job(number, tuple(tables[first:last]), samples, self.objective)
            for number, (first, last) in enumerate(pairwise(ends))
        ]

    def _value(self, found: Result | None) -> float:
        if found is None or found.kind != "ok" or found.values is None:
            return math.nan
        mean = round(float(np.mean(found.values)), DIGITS)
        return -mean if find_objective(self.objective).higher_is_better else mean

    def _keep(self, job: Job, outcome: JobOutcome) -> None:
        self.ledger.keep(job, outcome)
        if self._over_time():
            raise LimitReachedError(self._limit(job.samples))

    def _left(self, samples: Minibatch) -> int:
        """Return how many more candidates may be measured."""
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
            return f"{spent.tokens} tokens were read, and one more candidate could exceed {limits.tokens}"
        return f"the {limits.seconds:g} seconds that were allowed are over"
