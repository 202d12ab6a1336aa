"""Candidates of a search: jobs that measure them, the pool of the best, and whether the budgets matter at all.

A candidate that cannot be evaluated is no error of the search. Only what would fail for every candidate, a request that
cannot be carried out or a broken installation, is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.canonical import sha256_of
from kvsearch.workers import base

FLAT = 1e-6  # relative; values that differ by less are the same
MAX_POOL = 1024  # candidates of a pool beside the start plans
STARTS = "start"  # where they were found

Minibatch = tuple[int, ...] | None  # numbers of samples; None: all


class TrialJob(NamedTuple):
    """Candidates, tables of budgets [L, Hkv], to be evaluated together: values [P, S] of P candidates on S samples.

    `objective` says what is measured on the samples. Numbers of samples and objective together have one meaning in a
    run: samples of several splits are numbered through.
    """

    candidates: tuple[Ints, ...]
    samples: Minibatch
    objective: str

    @property
    def keys(self) -> list[str]:
        """The `candidate_key` of each candidate."""
        return [candidate_key(candidate, self.objective, self.samples) for candidate in self.candidates]


JobOutcome = base.Outcome[Floats]
Evaluator = base.Evaluator[TrialJob, Floats]
Executor = base.Executor[TrialJob, Floats]


def candidate_key(candidate: Ints, objective: str, samples: Minibatch) -> str:
    """Return the SHA-256 of all that decides a candidate's values in a run: budgets, objective and samples."""
    return sha256_of({"budgets": candidate.tolist(), "objective": objective, "samples": samples})


@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate [L, Hkv], its value on all samples (less is better), and where it was found.

    With parity, while the search runs, the value is minus the fitness.
    """

    table: Ints
    value: float
    where: str


@dataclass
class SearchOutcome:
    """What a search found: candidates worth a second look, the best first, and why it ended.

    These are the start plans and the best others, so many that no search has more finalists.

    `result` is what the paper's procedure comes to (with parity): the best group state, completed to the total; None if
    no candidate was measured, or `flat`. `mean` is what the optimiser of the last stage thinks best, which averages
    over noise. `flat`: nothing that was tried made a difference.
    """

    pool: list[Candidate] = field(default_factory=list)
    result: Candidate | None = None
    mean: Candidate | None = None
    ended: str = "all stages are finished"
    flat: bool = False

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Add candidates with finite values to the pool; of equal ones the better stays, else the first."""
        pool = {candidate.table.tobytes(): candidate for candidate in self.pool}
        for candidate in candidates:
            key = candidate.table.tobytes()
            if math.isfinite(candidate.value) and (key not in pool or candidate.value < pool[key].value):
                pool[key] = candidate
        ranked = sorted(pool.values(), key=lambda candidate: candidate.value)
        starts = [candidate for candidate in ranked[MAX_POOL:] if candidate.where.startswith(STARTS)]
        self.pool = [*ranked[:MAX_POOL], *starts]


class Flatness:
    """The smallest and the largest value on each set of samples, and how many different candidates there were.

    Once two differ there is nothing more to note.
    """

    def __init__(self, objective: str) -> None:
        self._objective = objective
        self._differ = False
        self._ranges: dict[Minibatch, tuple[float, float]] = {}
        self._plans: set[bytes] = set()

    def add(self, tables: Iterable[Ints], values: Iterable[float], samples: Minibatch = None) -> None:
        """Take note of values, as measured; those that are not finite do not count."""
        for table, value in zip(tables, values, strict=True):
            if math.isfinite(value) and not self._differ:
                low, high = self._ranges.get(samples, (value, value))
                low, high = self._ranges[samples] = min(low, value), max(high, value)
                self._plans.add(table.tobytes())
                self._differ = high - low > FLAT * max(1.0, abs(high))
        if self._differ:
            self._ranges.clear()
            self._plans.clear()

    @property
    def verdict(self) -> str | None:
        """Why there is nothing to search, in words; None if different plans differ, or only one was tried."""
        if len(self._plans) < 2:
            return None
        if self._objective == "metric" and all(high == 0 for _, high in self._ranges.values()):
            return f"the metric is zero for all {len(self._plans)} plans, so it tells none apart: search by nll"
        return f"{len(self._plans)} plans and all the same: this budget does not matter here"
