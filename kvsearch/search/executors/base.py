"""What an executor does: it takes jobs, has them evaluated by its workers, and tells what became of each as data.

A candidate that cannot be evaluated is no error of the search. Only what would fail for every candidate, a request that
cannot be carried out or a broken installation, is raised.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from kvsearch.arrays import Floats, Ints
from kvsearch.errors import InternalError, KvsearchError
from kvsearch.models.memory import free_memory, is_out_of_memory
from kvsearch.plan.canonical import sha256_of

OutcomeKind = Literal["ok", "oom", "timeout", "error", "non-finite"]
_LONGEST_MESSAGE = 300


class Job(NamedTuple):
    """Candidates, tables of budgets [L, Hkv], to be evaluated together.

    `samples` are numbers of the samples to use, None: all. `objective` says what is measured on them. Numbers and
    objective together have one meaning in a run: samples of several splits are numbered through.
    """

    id: int
    candidates: tuple[Ints, ...]
    samples: tuple[int, ...] | None
    objective: str


class JobOutcome(NamedTuple):
    """What became of a job: `values` [P, S] of its P candidates on its S samples, where there are any.

    ok          all values are there and finite
    oom         memory was short: fewer candidates at once may fit
    timeout     the time for a job was over
    error       something else failed
    non-finite  values are there, and those of at least one candidate hold NaN or infinity

    `message` is one line, empty for "ok"; `seconds` and `tokens` are what it took, as far as it is known.
    """

    id: int
    kind: OutcomeKind
    values: Floats | None
    message: str
    seconds: float
    tokens: int


class Result(NamedTuple):
    """What became of one candidate: `values` [S], or None; `seconds` is its share of its job's."""

    kind: OutcomeKind
    values: Floats | None
    seconds: float
    message: str


class Evaluator(Protocol):
    """Measures candidates; a worker has one, with its own model."""

    @property
    def tokens_spent(self) -> int:
        """Tokens that went through the model so far."""
        ...

    def evaluate(self, job: Job) -> Floats:
        """Return the values [P, S] of the job's candidates on its samples."""
        ...

    def close(self) -> None:
        """Give back memory and files."""
        ...


class Executor(ABC):
    """Evaluates jobs; which worker takes which, and in what order they end, changes no value.

    Subclasses take jobs from `_waiting`, put them back after an interruption, and `_drop` what they raise an error for.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._unfinished: set[int] = set()
        self._closed = False

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many jobs are evaluated at the same time."""

    @property
    def pending(self) -> int:
        """How many jobs were submitted whose outcomes were not handed out yet."""
        return len(self._unfinished)

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            InternalError: its id is taken by a pending job, it has no candidates, or the executor is closed.
        """
        if self._closed:
            raise InternalError(f"cannot submit job {job.id}: the executor is closed")
        if job.id in self._unfinished:
            raise InternalError(f"cannot submit job {job.id}: a pending job has its id")
        if not job.candidates:
            raise InternalError(f"cannot submit job {job.id}: it has no candidates")
        self._unfinished.add(job.id)
        self._waiting.append(job)

    def poll(self, timeout: float | None = None) -> list[JobOutcome]:
        """Hand out outcomes that were not yet, in any order; waits up to `timeout` seconds (None: on) for the first.

        Empty if nothing is pending or the time is over. A job under way in this process is not cut short.

        Raises:
            KvsearchError: an evaluator raised it; its job is dropped and the others stay pending.
            InternalError: the executor is closed.
        """
        if self._closed:
            raise InternalError("cannot poll an executor that is closed")
        outcomes = self._poll(timeout) if self._unfinished else []
        self._unfinished.difference_update(outcome.id for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """End the workers and drop what is pending; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._unfinished.clear()
            self._close()

    @abstractmethod
    def _poll(self, timeout: float | None) -> list[JobOutcome]: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _drop(self, job: Job) -> None:
        self._unfinished.discard(job.id)


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


def attempt(evaluator: Evaluator, job: Job) -> JobOutcome:
    """Evaluate a job; what goes wrong becomes an outcome.

    Raises:
        KvsearchError: as the evaluator raised it, and InternalError if its values have another shape than [P, S].
    """
    spent, start = evaluator.tokens_spent, time.perf_counter()
    values: Floats | None = None
    kind: OutcomeKind
    try:
        values = np.asarray(evaluator.evaluate(job), dtype=np.float64)
    except KvsearchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever fails for one job must not end the search
        kind, message = ("oom" if is_out_of_memory(error) else "error"), in_one_line(error)
    else:
        _require_shape(values, job)
        kind, message = _judged(values)
    if kind == "oom":
        free_memory()
    return JobOutcome(job.id, kind, values, message, time.perf_counter() - start, evaluator.tokens_spent - spent)


def in_one_line(error: BaseException) -> str:
    """Return type and text of an error, `shortened`."""
    return shortened(f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    """Return a text on one line and not too long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."


def _judged(values: Floats) -> tuple[OutcomeKind, str]:
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if not bad.size:
        return "ok", ""
    first = bad[0]
    sample = int(np.flatnonzero(~np.isfinite(values[first]))[0])
    named = ", ".join(str(number) for number in bad[:8]) + (", ..." if bad.size > 8 else "")
    where = f"candidate {first} has {values[first, sample]} on sample {sample} of its job"
    return "non-finite", f"values of candidates {named} of {len(values)} are not finite: {where}"


def _require_shape(values: Floats, job: Job) -> None:
    samples = None if job.samples is None else len(job.samples)
    if values.ndim != 2 or len(values) != len(job.candidates) or samples not in (None, values.shape[1]):
        wanted = f"[{len(job.candidates)}, {'S' if samples is None else samples}]"
        raise InternalError(f"an evaluator gave values of shape {list(values.shape)} for job {job.id}, not {wanted}")
