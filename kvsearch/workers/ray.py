"""Executor on Ray: several processes, GPUs or nodes, each with its own model. Needs `kvsearch[ray]`.

A worker is an actor that builds an evaluator and then takes one job after the other. Ray neither restarts actors nor
repeats what they did (`max_restarts=0`, `max_task_retries=0`): an actor that it restarts is one without a model. A
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
from typing import Any, ClassVar, Generic

from kvsearch.closing import Closing
from kvsearch.errors import EnvironmentFault, KvsearchError, KvsearchWarning
from kvsearch.workers.base import Evaluator, Executor, Jobs, Outcome, Values, attempt, in_one_line, shortened
from kvsearch.workers.cluster import RayWorkers, connect, import_ray, require_room

Factory = Callable[[], Evaluator[Jobs, Values]]

_SLICE = 5.0  # seconds of one wait: an interruption is seen in between
_FAREWELL = 5.0  # seconds for evaluators to give back files
_MOST_STARTS = 3  # of one worker in a row


class RayPool(Closing):
    """Actors that executors take from it and give back, with the processes they live in and what these have loaded.

    Raises:
        UsageError: the address is none.
        EnvironmentFault: Ray is missing, the cluster does not answer or has no room for the workers.
    """

    def __init__(self, wanted: RayWorkers) -> None:
        self.ray, self.wanted, self.workers = import_ray(), wanted, wanted.workers
        self._free: list[Any] = []
        self._taken: list[Any] = []
        self._ours = connect(self.ray, wanted.address)
        try:
            require_room(self.ray, wanted)
            self._kind = self.ray.remote(
                num_cpus=wanted.cpus, num_gpus=wanted.gpus, max_restarts=0, max_task_retries=0
            )(_Actor)
        except BaseException:
            self._disconnect()
            raise

    def take(self) -> Any:
        """Return an actor that nobody has, if need be a new one."""
        self._taken.append(self._free.pop() if self._free else self._kind.remote())
        return self._taken[-1]

    def give_back(self, actor: Any) -> None:
        """Have an actor for the next executor; it may still be busy with what it was told to start."""
        if actor in self._taken:  # else the pool was closed meanwhile
            self._taken.remove(actor)
            self._free.append(actor)

    def kill(self, actor: Any) -> None:
        """End an actor, and its process."""
        if actor in self._taken:
            self._taken.remove(actor)
        self.ray.kill(actor)

    def close(self) -> None:
        """End all actors, and the cluster if it was started here; closing again does nothing."""
        actors, self._taken, self._free = [*self._taken, *self._free], [], []
        for actor in actors:
            with suppress(self.ray.exceptions.RayError):
                self.ray.kill(actor)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._ours:
            self._ours = False
            self.ray.shutdown()


class RayExecutor(Executor[Jobs, Values]):
    """Has jobs done on as many workers as there are; an idle worker gets the next job.

    `factory` builds the evaluator of a worker: `functools.partial(function, *arguments)`, small to send, of a function
    that the workers can import. Inside it a worker with a GPU sees that one only, as `cuda:0`. Ray allows a worker as
    many threads as it has CPUs; as the number of threads decides the last bits of a result, an evaluator that should
    give the same values everywhere sets it itself.

    A job that takes longer than `job_timeout` is a "timeout", unless jobs are not `timed`. One whose worker dies is
    given to another worker, and is an "error" if that dies, too. What a job had cost that ended so is not known: its
    tokens are 0. A worker that does not start is given up with a `KvsearchWarning`.

    With a pool the workers are its own, at most `most` of them: those that are not in the middle of a job are given
    back to it, so that the next executor finds what they have loaded.

    Raises:
        UsageError, EnvironmentFault: see `RayPool`; from `poll` EnvironmentFault: no worker could be started, or an
            evaluator could not be built.
    """

    name: ClassVar[str] = "ray"

    def __init__(
        self,
        factory: Factory[Jobs, Values],
        where: RayWorkers | RayPool,
        most: int | None = None,
        timed: bool = True,
    ) -> None:
        super().__init__()
        self._own = not isinstance(where, RayPool)
        self._pool = where if isinstance(where, RayPool) else RayPool(where)
        self._ray, self._wanted = self._pool.ray, self._pool.wanted
        self._job_timeout = self._wanted.job_timeout if timed else None
        self._deaths: Counter[int] = Counter()  # of workers, by the job they had
        self._outcomes: list[Outcome[Values]] = []
        self._given_up, self._proven = "", False  # why a worker was; whether one ever started
        count = self._pool.workers if most is None else min(most, self._pool.workers)
        self._workers: list[_Worker[Jobs]] = []
        try:
            self._factory = self._ray.put(factory)
            for _ in range(count):
                self._workers.append(self._started(_Worker()))
        except BaseException:
            self._close()
            raise

    @property
    def workers(self) -> int:
        """How many workers there are, those that are starting included."""
        return len(self._workers)

    def _poll(self, timeout: float | None) -> list[Outcome[Values]]:
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
                worker.begin(self._job_timeout)

    def _finish(self, worker: _Worker[Jobs]) -> None:
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

    def _start_ended(self, worker: _Worker[Jobs], problem: KvsearchError | None) -> None:
        if problem is None:
            worker.failed_starts, self._proven = 0, True
        elif self._proven and isinstance(problem, EnvironmentFault):  # one of the machines is at fault
            self._give_up(worker, str(problem))
        else:
            self._given_up = str(problem)
            self._dismiss(worker)
            raise problem

    def _expire(self, worker: _Worker[Jobs]) -> None:
        if worker.task is None or worker.deadline > time.monotonic():
            return
        job, seconds = worker.job, time.monotonic() - worker.since
        worker.rest()
        if job is None:
            self._give_up(worker, f"it did not start within {self._wanted.start_timeout:g} seconds")
        else:
            self._replace(worker)
            message = f"took longer than {self._job_timeout:g} seconds"
            self._end(job, Outcome(job.id, "timeout", None, message, seconds, 0))

    def _died(self, worker: _Worker[Jobs], job: Jobs, error: Exception, seconds: float) -> None:
        self._replace(worker)
        reason = _reason(error)
        self._deaths[job.id] += 1
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            self._end(job, Outcome(job.id, "oom", None, f"Ray ended its worker: {reason}", seconds, 0))
        elif self._deaths[job.id] == 1:
            self._waiting.appendleft(job)
        else:
            self._end(job, Outcome(job.id, "error", None, f"two workers died of it: {reason}", seconds, 0))

    def _died_at_start(self, worker: _Worker[Jobs], error: Exception) -> None:
        worker.failed_starts += 1
        if worker.failed_starts < _MOST_STARTS:
            self._replace(worker)
        else:
            reason = _reason(error)
            self._give_up(worker, f"it died {_MOST_STARTS} times while it started, at last of {reason}")

    def _end(self, job: Jobs, outcome: Outcome[Values]) -> None:
        self._deaths.pop(job.id, None)
        self._outcomes.append(outcome)

    def _started(self, worker: _Worker[Jobs]) -> _Worker[Jobs]:
        worker.actor = self._pool.take()
        worker.task = worker.actor.start.remote(self._factory)
        worker.begin(self._wanted.start_timeout)
        return worker

    def _replace(self, worker: _Worker[Jobs]) -> None:
        self._pool.kill(worker.actor)
        self._started(worker)

    def _give_up(self, worker: _Worker[Jobs], reason: str) -> None:
        self._dismiss(worker)
        self._given_up = reason
        if self._workers:
            left = f"goes on with {len(self._workers)} of {self._wanted.workers} Ray workers"
            warnings.warn(f"the work {left}, one was given up: {reason}", KvsearchWarning, stacklevel=2)
        else:
            raise EnvironmentFault(f"no Ray worker is left: {reason}")

    def _dismiss(self, worker: _Worker[Jobs]) -> None:
        self._workers.remove(worker)
        self._pool.kill(worker.actor)
        self._pool.workers -= 1

    def _close(self) -> None:
        try:
            if self._ray.is_initialized():
                self._dissolve()
        finally:
            self._workers = []
            if self._own:
                self._pool.close()

    def _dissolve(self) -> None:
        """Let evaluators that are idle tidy up, and end the workers or give them back."""
        leaving = [worker.actor.stop.remote() for worker in self._workers if worker.task is None]
        try:
            if leaving:
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_FAREWELL)
        finally:
            for worker in self._workers:
                if worker.job is None and not self._own:
                    self._pool.give_back(worker.actor)
                else:
                    with suppress(self._ray.exceptions.RayError):
                        self._pool.kill(worker.actor)


@dataclass(eq=False)
class _Worker(Generic[Jobs]):
    """What an actor is doing: nothing (no `task`), starting (no `job`), or a job, in any case until `deadline`."""

    actor: Any = None
    task: Any = None
    job: Jobs | None = None
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

    _evaluator: Any = None

    def start(self, factory: Factory[Any, Any]) -> KvsearchError | None:
        self.stop()
        try:
            self._evaluator = factory()
        except KvsearchError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver has to know
            return EnvironmentFault(f"a Ray worker cannot build its evaluator: {in_one_line(error)}")
        return None

    def evaluate(self, job: Any) -> Outcome[Any] | KvsearchError:
        try:
            return attempt(self._evaluator, job)
        except KvsearchError as error:
            return error

    def stop(self) -> None:
        """Close the evaluator, if there is one."""
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            evaluator.close()


def _reason(error: Exception) -> str:
    """Return what Ray says in one line, without its indented list of ids."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return in_one_line(cause)
    told = [line for line in str(error).splitlines() if line == line.lstrip()]
    return shortened(" ".join([f"{type(error).__name__}:", *told]))
