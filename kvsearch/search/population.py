"""A whole population through an executor: what does not fit is split, and what fails does not end the search."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.errors import EnvironmentFault, IncompatibleError, InternalError, UsageError
from kvsearch.search.jobs import Executor, Job, JobOutcome, Result, keys_of, results_of

Store = Callable[[Job, JobOutcome], None]
_MESSAGES = 3


def evaluate_all(
    executor: Executor,
    jobs: Sequence[Job],
    store: Store | None = None,
    known: Mapping[str, Result] | None = None,
    generation: int | None = None,
) -> dict[int, JobOutcome]:
    """Evaluate jobs; a job that memory is too short for is halved, down to one candidate. The outcomes by job id.

    The outcome of a job has a row of values per candidate, NaN for one without any; its kind and message are those of
    the first candidate that failed. `store` is called for each part of a job as soon as it is finished, in any order.

    `known` are results by `candidate_key`: what they cover is not evaluated again, and the parts that are left are
    the same as if nothing were known. Which candidates are measured together decides the last bits of their values.

    `generation` is the number of candidates that the failures are counted against, by default those of `jobs`.

    Raises:
        IncompatibleError: more than half of the generation failed, all with values that are not finite.
        EnvironmentFault: more than half of the generation failed.
        KvsearchError: an evaluator raised it.
        InternalError: the executor has pending jobs of someone else, or two jobs have the same id.
    """
    if executor.pending or len({job.id for job in jobs}) < len(jobs):
        raise InternalError("evaluate_all needs an executor without pending jobs, and jobs with different ids")
    size = sum(len(job.candidates) for job in jobs) if generation is None else generation
    return _Population(executor, jobs, store, known or {}, size).run()


def worst_of(values: Iterable[float]) -> float:
    """Return the finite value of a failed candidate: above (worse than) all finite `values` of its generation.

    The distance is the spread of the finite values, but at least 1 and at least the size of the largest: enough for any
    optimiser to turn away, not so much that a fitted surface has nothing else in it.

    Raises:
        UsageError: no value is finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        raise UsageError("no candidate of the generation has a finite value: there is nothing to be worse than")
    most, least = max(finite), min(finite)
    return min(most + max(most - least, abs(most), 1.0), sys.float_info.max)


class _Part(NamedTuple):
    """Consecutive candidates of a job, from number `start` on, and what attempts at them have cost before."""

    job: Job
    start: int
    seconds: float = 0.0
    tokens: int = 0

    def halves(self, seconds: float = 0.0, tokens: int = 0) -> tuple[_Part, _Part]:
        """Return two parts; the first carries the cost."""
        middle = len(self.job.candidates) // 2
        first, second = self.job.candidates[:middle], self.job.candidates[middle:]
        cost = (self.seconds + seconds, self.tokens + tokens)
        return (
            _Part(self.job._replace(candidates=first), self.start, *cost),
            _Part(self.job._replace(candidates=second), self.start + middle),
        )


class _Population:
    def __init__(
        self, executor: Executor, jobs: Sequence[Job], store: Store | None, known: Mapping[str, Result], size: int
    ) -> None:
        self._executor, self._jobs, self._store, self._known, self._size = executor, jobs, store, known, size
        self._results: dict[int, dict[int, Result]] = {job.id: {} for job in jobs}  # by job and number of the candidate
        self._cost = {job.id: (0.0, 0) for job in jobs}
        self._parts: dict[int, _Part] = {}
        self._ids = itertools.count()
        self._failures: list[Result] = []

    def run(self) -> dict[int, JobOutcome]:
        for job in self._jobs:
            self._submit(_Part(job, 0))
        while self._parts:
            for outcome in self._executor.poll():
                self._take(self._parts.pop(outcome.id), outcome)
        return {job.id: self._whole(job) for job in self._jobs}

    def _submit(self, part: _Part) -> None:
        found = [self._known.get(key) for key in keys_of(part.job)]
        results = [result for result in found if result is not None]
        if len(results) == len(found):
            self._settle(part, results)
        elif results:  # jobs are kept as a whole: this one was split
            for half in part.halves():
                self._submit(half)
        else:
            number = next(self._ids)
            self._parts[number] = part
            self._executor.submit(part.job._replace(id=number))

    def _take(self, part: _Part, outcome: JobOutcome) -> None:
        if outcome.kind == "oom" and len(part.job.candidates) > 1:
            for half in part.halves(outcome.seconds, outcome.tokens):
                self._submit(half)
            return
        seconds, tokens = outcome.seconds + part.seconds, outcome.tokens + part.tokens
        outcome = outcome._replace(id=part.job.id, seconds=seconds, tokens=tokens)
        before = self._cost[part.job.id]
        self._cost[part.job.id] = (before[0] + seconds, before[1] + tokens)
        if self._store is not None:
            self._store(part.job, outcome)
        self._settle(part, results_of(outcome, len(part.job.candidates)))

    def _settle(self, part: _Part, results: Sequence[Result]) -> None:
        self._results[part.job.id].update(enumerate(results, part.start))
        self._failures += [result for result in results if result.kind != "ok"]
        if 2 * len(self._failures) > self._size:
            raise _broken(self._failures, self._size)

    def _whole(self, job: Job) -> JobOutcome:
        found = self._results[job.id]
        results = [found[number] for number in range(len(job.candidates))]
        failed = next((result for result in results if result.kind != "ok"), Result("ok", None, 0.0, ""))
        return JobOutcome(job.id, failed.kind, _stacked(results), failed.message, *self._cost[job.id])


def _stacked(results: Sequence[Result]) -> Floats | None:
    rows = [result.values for result in results]
    samples = next((len(row) for row in rows if row is not None), None)
    if samples is None:
        return None
    return np.stack([np.full(samples, np.nan) if row is None else row for row in rows])


def _broken(failures: Sequence[Result], size: int) -> IncompatibleError | EnvironmentFault:
    messages = list(dict.fromkeys(f"{result.kind}: {result.message}" for result in failures))
    more = f"; and {len(messages) - _MESSAGES} more" if len(messages) > _MESSAGES else ""
    told = f"{len(failures)} of {size} candidates failed ({'; '.join(messages[:_MESSAGES])}{more})"
    if all(result.kind == "non-finite" for result in failures):
        return IncompatibleError(f"{told}: the model or the data give no finite values, check them in float32")
    return EnvironmentFault(f"{told}: see to it, then go on with --resume")
