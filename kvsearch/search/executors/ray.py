"""Executor on Ray: several processes, GPUs or nodes, each with its own model. Needs `kvsearch[ray]`.

A worker is an actor that builds its evaluator once and then takes one job after the other. Ray neither restarts actors
nor repeats what they did (`max_restarts=0`, `max_task_retries=0`): an actor that it restarts is one without a model. A
worker that dies or is too slow is replaced here, see `RayExecutor`. No wait is without an end.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsearch.errors import EnvironmentFault, KvsearchError, KvsearchWarning
from kvsearch.search.executors.base import Evaluator, Executor, Job, JobOutcome, attempt, in_one_line, shortened
from kvsearch.search.executors.cluster import RayWorkers, connect, import_ray, require_room

Factory = Callable[[], Evaluator]

_SLICE = 5.0  # seconds of one wait: an interruption is seen in between
_FAREWELL = 5.0  # seconds for evaluators to give back files
_MOST_STARTS = 3  # of one worker in a row


class RayExecutor(Executor):
    """Evaluates jobs on as many workers as there are; an idle worker gets the next job.

    `factory` builds the evaluator of a worker: `functools.partial(function, *arguments)`, small to send, of a function
    that the workers can import. Inside it a worker with a GPU sees that one only, as `cuda:0`. Ray allows a worker as
    many threads as it has CPUs; as the number of threads decides the last bits of a result, an evaluator that should
    give the same values everywhere sets it itself.

    A job that takes longer than `job_timeout` is a "timeout". One whose worker dies is given to another worker, and is
    an "error" if that dies, too. What a job had cost that ended so is not known: its tokens are 0. A worker that does
    not start is given up with a `KvsearchWarning`.

    Raises:
        UsageError: the address is none.
        EnvironmentFault: Ray is missing, the cluster does not answer or has no room for the workers; from `poll`: no
            worker could be started, or an evaluator could not be built.
    """

    name: ClassVar[str] = "ray"

    def __init__(self, factory: Factory, wanted: RayWorkers) -> None:
        super().__init__()
        self._ray, self._wanted = import_ray(), wanted
        self._deaths: Counter[int] = Counter()  # of workers, by the job they had
        self._outcomes: list[JobOutcome] = []
        self._given_up, self._proven = "", False  # why a worker was; whether one ever started
        self._ours = connect(self._ray, wanted.address)
        try:
            require_room(self._ray, wanted)
            self._factory = self._ray.put(factory)
            self._actor = self._ray.remote(
                num_cpus=wanted.cpus, num_gpus=wanted.gpus, max_restarts=0, max_task_retries=0
            )(_Actor)
            self._workers = [self._started(_Worker()) for _ in range(wanted.workers)]
        except BaseException:
            self._disconnect()
            raise

    @property
    def workers(self) -> int:
        """How many workers there are, those that are starting included."""
        return len(self._workers)

    def _poll(self, timeout: float | None) -> list[JobOutcome]:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._hand_out()
            busy = {worker.task: worker for worker in self._workers if worker.task is not None}
            now = time.monotonic()
            wake = min(end, now + _SLICE, *(worker.deadline for worker in busy.values()))
            self._ray.wait(list(busy), timeout=0.0 if self._outcomes else max(0.0, wake - now))
            # What is ready counts as in time, however long nobody asked for it.
            ready, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=0.0)
            for task in ready:
                self._finish(busy[task])
            for worker in busy.values():
                self._expire(worker)
            if self._outcomes or time.monotonic() >= end:
                outcomes, self._outcomes = self._outcomes, []
                return outcomes

    def _hand_out(self) -> None:
        if not self._workers:
            raise EnvironmentFault(f"no Ray worker is left: {self._given_up}")
        for worker in self._workers:
            if worker.task is None and self._waiting:
                worker.job = self._waiting.popleft()
                worker.task = worker.actor.evaluate.remote(worker.job)
                worker.begin(self._wanted.job_timeout)

    def _finish(self, worker: _Worker) -> None:
        """Take what a worker has ready: the outcome of its job, or that it started."""
        task, job, seconds = worker.task, worker.job, time.monotonic() - worker.since
        worker.rest()
        try:
            found = self._ray.get(task, timeout=_SLICE)
        except self._ray.exceptions.RayError as error:
            if job is None:
                self._died_at_start(worker, error)
            else:
                self._died(worker, job, error, seconds)
            return
        if job is None:
            self._start_ended(worker, found)
        elif isinstance(found, KvsearchError):
            self._drop(job)
            raise found
        else:
            self._end(job, found)

    def _start_ended(self, worker: _Worker, problem: KvsearchError | None) -> None:
        if problem is None:
            worker.failed_starts, self._proven = 0, True
        elif self._proven and isinstance(problem, EnvironmentFault):  # one of the machines is at fault
            self._give_up(worker, str(problem))
        else:
            self._given_up = str(problem)
            self._dismiss(worker)
            raise problem

    def _expire(self, worker: _Worker) -> None:
        if worker.task is None or worker.deadline > time.monotonic():
            return
        job, seconds = worker.job, time.monotonic() - worker.since
        worker.rest()
        if job is None:
            self._give_up(worker, f"it did not start within {self._wanted.start_timeout:g} seconds")
        else:
            self._replace(worker)
            message = f"took longer than {self._wanted.job_timeout:g} seconds"
            self._end(job, JobOutcome(job.id, "timeout", None, message, seconds, 0))

    def _died(self, worker: _Worker, job: Job, error: Exception, seconds: float) -> None:
        self._replace(worker)
        reason = _reason(error)
        self._deaths[job.id] += 1
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            self._end(job, JobOutcome(job.id, "oom", None, f"Ray ended its worker: {reason}", seconds, 0))
        elif self._deaths[job.id] == 1:
            self._waiting.appendleft(job)
        else:
            self._end(job, JobOutcome(job.id, "error", None, f"two workers died of it: {reason}", seconds, 0))

    def _died_at_start(self, worker: _Worker, error: Exception) -> None:
        worker.failed_starts += 1
        if worker.failed_starts < _MOST_STARTS:
            self._replace(worker)
        else:
            reason = _reason(error)
            self._give_up(worker, f"it died {_MOST_STARTS} times while it started, at last of {reason}")

    def _end(self, job: Job, outcome: JobOutcome) -> None:
        self._deaths.pop(job.id, None)
        self._outcomes.append(outcome)

    def _started(self, worker: _Worker) -> _Worker:
        worker.actor = self._actor.remote()
        worker.task = worker.actor.start.remote(self._factory)
        worker.begin(self._wanted.start_timeout)
        return worker

    def _replace(self, worker: _Worker) -> None:
        self._ray.kill(worker.actor)
        self._started(worker)

    def _give_up(self, worker: _Worker, reason: str) -> None:
        self._dismiss(worker)
        self._given_up = reason
        if self._workers:
            left = f"goes on with {len(self._workers)} of {self._wanted.workers} Ray workers"
            warnings.warn(f"the search {left}, one was given up: {reason}", KvsearchWarning, stacklevel=2)
        else:
            raise EnvironmentFault(f"no Ray worker is left: {reason}")

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._ray.kill(worker.actor)

    def _close(self) -> None:
        try:
            leaving = [worker.actor.stop.remote() for worker in self._workers if worker.task is None]
            if leaving:
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_FAREWELL)
        finally:
            for worker in self._workers:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(worker.actor)
            self._disconnect()

    def _disconnect(self) -> None:
        if self._ours:
            self._ray.shutdown()


@dataclass(eq=False)
class _Worker:
    """What an actor is doing: nothing (no `task`), starting (no `job`), or a job, in any case until `deadline`."""

    actor: Any = None
    task: Any = None
    job: Job | None = None
    since: float = 0.0
    deadline: float = math.inf
    failed_starts: int = 0

    def begin(self, limit: float | None) -> None:
        self.since = time.monotonic()
        self.deadline = math.inf if limit is None else self.since + limit

    def rest(self) -> None:
        self.task, self.job, self.deadline = None, None, math.inf


class _Actor:
    """The part of a worker that runs in its own process. What kvsearch raises there is returned, to be raised here."""

    def start(self, factory: Factory) -> KvsearchError | None:
        try:
            self._evaluator = factory()
        except KvsearchError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver has to know
            return EnvironmentFault(f"a Ray worker cannot build its evaluator: {in_one_line(error)}")
        return None

    def evaluate(self, job: Job) -> JobOutcome | KvsearchError:
        try:
            return attempt(self._evaluator, job)
        except KvsearchError as error:
            return error

    def stop(self) -> None:
        self._evaluator.close()


def _reason(error: Exception) -> str:
    """Return what Ray says in one line, without its indented list of ids."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return in_one_line(cause)
    told = [line for line in str(error).splitlines() if line == line.lstrip()]
    return shortened(" ".join([f"{type(error).__name__}:", *told]))
