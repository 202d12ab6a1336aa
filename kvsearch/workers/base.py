"""What an executor does: it takes jobs, has them done by its workers, and tells what became of each as data.

Only what would fail for every job, a request that cannot be carried out or a broken installation, is raised.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from kvsearch.closing import Closing
from kvsearch.errors import InternalError, KvsearchError
from kvsearch.models.memory import free_memory, is_out_of_memory

OutcomeKind = Literal["ok", "oom", "timeout", "error", "non-finite"]
_LONGEST_MESSAGE = 300


class Job(Protocol):
    """Something to do; pending jobs of an executor have different ids."""

    @property
    def id(self) -> int:
        """Its number."""
        ...

    def require(self) -> None:
        """Raise InternalError if there is nothing to do."""
        ...

    def judged(self, values: Any) -> tuple[OutcomeKind, str]:
        """Return the kind of an outcome with these values, and a message; InternalError if they are not of this job."""
        ...


Jobs = TypeVar("Jobs", bound=Job)
Values = TypeVar("Values")
Asked = TypeVar("Asked", bound=Job, contravariant=True)
Given = TypeVar("Given", covariant=True)


class Outcome(NamedTuple, Generic[Values]):
    """What became of a job: its `values`, where there are any.

    ok          all values are there
    oom         memory was short: less at once may fit
    timeout     the time for a job was over
    error       something else failed
    non-finite  values are there, some of them NaN or infinite

    `message` is one line, empty for "ok"; `seconds` and `tokens` are what it took, as far as it is known.
    """

    id: int
    kind: OutcomeKind
    values: Values | None
    message: str
    seconds: float
    tokens: int


class Evaluator(Protocol[Asked, Given]):
    """Does jobs; a worker has one, with its own model."""

    @property
    def tokens_spent(self) -> int:
        """Tokens that went through the model so far."""
        ...

    def evaluate(self, job: Asked) -> Given:
        """Return the values of a job."""
        ...

    def close(self) -> None:
        """Give back memory and files."""
        ...


class Executor(Closing, Generic[Jobs, Values]):
    """Has jobs done; which worker takes which, and in what order they end, changes no value.

    Subclasses take jobs from `_waiting`, put them back after an interruption, and `_drop` what they raise an error for.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._waiting: deque[Jobs] = deque()
        self._unfinished: set[int] = set()
        self._closed = False

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many jobs are done at the same time."""

    @property
    def pending(self) -> int:
        """How many jobs were submitted whose outcomes were not handed out yet."""
        return len(self._unfinished)

    def submit(self, job: Jobs) -> None:
        """Queue a job.

        Raises:
            InternalError: its id is taken by a pending job, there is nothing to do, or the executor is closed.
        """
        if self._closed:
            raise InternalError(f"cannot submit job {job.id}: the executor is closed")
        if job.id in self._unfinished:
            raise InternalError(f"cannot submit job {job.id}: a pending job has its id")
        job.require()
        self._unfinished.add(job.id)
        self._waiting.append(job)

    def poll(self, timeout: float | None = None) -> list[Outcome[Values]]:
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
    def _poll(self, timeout: float | None) -> list[Outcome[Values]]: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _drop(self, job: Jobs) -> None:
        self._unfinished.discard(job.id)


def attempt(evaluator: Evaluator[Jobs, Values], job: Jobs) -> Outcome[Values]:
    """Do a job; what goes wrong becomes an outcome.

    Raises:
        KvsearchError: as the evaluator raised it, and InternalError if its values are not of the job.
    """
    spent, start = evaluator.tokens_spent, time.perf_counter()
    values: Values | None = None
    kind: OutcomeKind
    try:
        values = evaluator.evaluate(job)
    except KvsearchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever fails for one job must not end the others
        kind, message = ("oom" if is_out_of_memory(error) else "error"), in_one_line(error)
    else:
        kind, message = job.judged(values)
    if kind == "oom":
        free_memory()
    return Outcome(job.id, kind, values, message, time.perf_counter() - start, evaluator.tokens_spent - spent)


def in_one_line(error: BaseException) -> str:
    """Return type and text of an error, `shortened`."""
    return shortened(f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    """Return a text on one line and not too long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
