"""Executors run jobs on evaluators and return the outcome of each as data.

Only what would fail for every job, a request that cannot be carried out or a broken installation, is raised.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from kvsearch.core.errors import KvsearchError
from kvsearch.core.parsing import format_error
from kvsearch.core.resources import Closing
from kvsearch.models.memory import is_out_of_memory, release_memory

OutcomeKind = Literal["ok", "oom", "error", "non-finite"]

JobT = TypeVar("JobT")
ValuesT = TypeVar("ValuesT")
JobTaken = TypeVar("JobTaken", contravariant=True)
ValuesGiven = TypeVar("ValuesGiven", covariant=True)


class Outcome(NamedTuple, Generic[ValuesT]):
    """The outcome of a job, with its `values` if there are any.

    ok          all values are there
    oom         memory was short: less at once may fit
    error       something else failed
    non-finite  values are there, some of them NaN or infinite

    `message` is one line, empty for "ok"; `seconds` and `tokens` are what it took, as far as it is known.
    """

    kind: OutcomeKind
    values: ValuesT | None
    message: str
    seconds: float
    tokens: int


class Evaluator(Protocol[JobTaken, ValuesGiven]):
    """Evaluates jobs; every worker has one, with its own model."""

    @property
    def tokens_spent(self) -> int:
        """Tokens that went through the model so far."""

    def evaluate(self, job: JobTaken) -> ValuesGiven:
        """Return the values of a job."""

    def close(self) -> None:
        """Give back memory and files."""


class Executor(Closing, Generic[JobT, ValuesT]):
    """Runs jobs; which worker takes which, and in what order they end, changes no value."""

    @abstractmethod
    def run(self, jobs: Sequence[JobT]) -> Iterator[tuple[int, Outcome[ValuesT]]]:
        """Yield the place of every job among `jobs` with its outcome, as soon as it is there.

        Raises:
            KvsearchError: an evaluator raised it.
        """


class SerialExecutor(Executor[JobT, ValuesT]):
    """Runs one job after the other in this process; closing it closes the evaluator."""

    def __init__(self, evaluator: Evaluator[JobT, ValuesT]) -> None:
        self._evaluator = evaluator

    def run(self, jobs: Sequence[JobT]) -> Iterator[tuple[int, Outcome[ValuesT]]]:
        for number, job in enumerate(jobs):
            yield number, attempt(self._evaluator, job)

    def close(self) -> None:
        self._evaluator.close()


def attempt(evaluator: Evaluator[JobT, ValuesT], job: JobT) -> Outcome[ValuesT]:
    """Run a job; failures become outcomes, but for a `KvsearchError`, which is raised."""
    tokens = evaluator.tokens_spent
    start = time.perf_counter()
    values: ValuesT | None = None
    kind: OutcomeKind = "ok"
    message = ""
    try:
        values = evaluator.evaluate(job)
    except KvsearchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever fails for one job must not end the others
        # A caller may try less at a time, which helps against nothing else.
        kind = "oom" if is_out_of_memory(error) else "error"
        message = format_error(error)
    if kind == "oom":
        release_memory()
    return Outcome(kind, values, message, time.perf_counter() - start, evaluator.tokens_spent - tokens)
