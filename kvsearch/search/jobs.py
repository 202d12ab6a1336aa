"""What a search has evaluated: candidates in jobs, and what became of each of them.

A candidate that cannot be evaluated is no error of the search. Only what would fail for every candidate, a request that
cannot be carried out or a broken installation, is raised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvsearch.arrays import Floats, Ints
from kvsearch.errors import InternalError
from kvsearch.plan.canonical import sha256_of
from kvsearch.workers import base
from kvsearch.workers.base import Outcome, OutcomeKind


class Job(NamedTuple):
    """Candidates, tables of budgets [L, Hkv], to be evaluated together: values [P, S] of P candidates on S samples.

    `samples` are numbers of the samples to use, None: all. `objective` says what is measured on them. Numbers and
    objective together have one meaning in a run: samples of several splits are numbered through.
    """

    id: int
    candidates: tuple[Ints, ...]
    samples: tuple[int, ...] | None
    objective: str

    def require(self) -> None:
        """See `kvsearch.workers.base.Job`."""
        if not self.candidates:
            raise InternalError(f"cannot submit job {self.id}: it has no candidates")

    def judged(self, values: Floats) -> tuple[OutcomeKind, str]:
        """See `kvsearch.workers.base.Job`; "non-finite" if values of at least one candidate hold NaN or infinity."""
        self._require_shape(values)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if not bad.size:
            return "ok", ""
        first = bad[0]
        sample = int(np.flatnonzero(~np.isfinite(values[first]))[0])
        named = ", ".join(str(number) for number in bad[:8]) + (", ..." if bad.size > 8 else "")
        where = f"candidate {first} has {values[first, sample]} on sample {sample} of its job"
        return "non-finite", f"values of candidates {named} of {len(values)} are not finite: {where}"

    def _require_shape(self, values: Floats) -> None:
        samples = None if self.samples is None else len(self.samples)
        if values.ndim != 2 or len(values) != len(self.candidates) or samples not in (None, values.shape[1]):
            wanted = f"[{len(self.candidates)}, {'S' if samples is None else samples}]"
            raise InternalError(
                f"an evaluator gave values of shape {list(values.shape)} for job {self.id}, not {wanted}"
            )


JobOutcome = Outcome[Floats]
Evaluator = base.Evaluator[Job, Floats]
Executor = base.Executor[Job, Floats]


class Result(NamedTuple):
    """What became of one candidate: `values` [S], or None; `seconds` is its share of its job's."""

    kind: OutcomeKind
    values: Floats | None
    seconds: float
    message: str


def candidate_key(candidate: Ints, objective: str, samples: tuple[int, ...] | None) -> str:
    """Return the SHA-256 of all that decides a candidate's values in a run: budgets, objective and samples."""
    return sha256_of({"budgets": candidate.tolist(), "objective": objective, "samples": samples})


def keys_of(job: Job) -> list[str]:
    """Return the `candidate_key` of each candidate of a job."""
    return [candidate_key(candidate, job.objective, job.samples) for candidate in job.candidates]


def results_of(outcome: JobOutcome, candidates: int) -> list[Result]:
    """Say what became of each of a job's `candidates`; beside one with values that are not finite, others are "ok"."""
    share = outcome.seconds / candidates
    if outcome.values is None:
        return [Result(outcome.kind, None, share, outcome.message)] * candidates
    bad = Result("non-finite", None, share, outcome.message)
    good = Result("ok", None, share, "")
    return [(good if np.isfinite(row).all() else bad)._replace(values=row) for row in outcome.values]
