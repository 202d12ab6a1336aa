"""Workers on Ray: several processes, GPUs or nodes, each with its own model. Needs `kvsearch[ray]`.

A worker is an actor that builds an evaluator and then takes one job after the other. Ray neither restarts actors nor
repeats what they did (`max_restarts=0`, `max_task_retries=0`): an actor that it restarts is one without a model. A
worker that dies is replaced here, and its job is done again.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from kvsearch.core.errors import EnvironmentFault, KvsearchError, UsageError
from kvsearch.core.parsing import format_error, shorten
from kvsearch.core.printed import pluralize
from kvsearch.core.resources import Closing
from kvsearch.workers.base import Evaluator, Executor, JobT, Outcome, ValuesT, attempt

_REACH = 10.0  # seconds for a cluster to answer at all
_STORE = 256 * 2**20  # bytes that workers of this machine share: jobs and values are small


def import_ray() -> Any:
    """Import Ray without the reports that its raylets print; workers that die are reported here.

    Raises:
        EnvironmentFault: it is not installed.
    """
    try:
        with _environment(RAY_DEDUP_LOGS_SKIP_REGEX="."):
            return import_module("ray")
    except ImportError as error:
        raise EnvironmentFault(f"Ray cannot be imported ({error}): run `pip install kvsearch[ray]`") from error


def connect(ray: Any, address: str | None) -> bool:
    """Connect to the cluster at `address`, or start one; False if this process has a connection already, which is used.

    Raises:
        UsageError: `address` is neither "auto" nor host:port.
        EnvironmentFault: no cluster answers there, or none can be started.
    """
    if ray.is_initialized():
        return False
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is None:
            # the workers do the work, so they are no nicer than others: with Ray's own 15 they wait for whoever is busy
            with _own_ends(), _environment(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0"):
                ray.init("local", include_dashboard=False, object_store_memory=_STORE, **quiet)
        else:
            _require_answer(address)
            with _own_ends(), _environment(RAY_gcs_server_port_wait_time_s="1"):  # else it tries for minutes
                ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentFault(f"cannot use a Ray cluster {where}: {what}") from error
    return True


def require_room(ray: Any, workers: int, need: Mapping[str, float]) -> None:
    """Raise EnvironmentFault, with the cluster's resources, if its nodes cannot hold all workers."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(nodes, need)
    if room < workers:
        has = ", ".join(f"{sum(node.get(name, 0.0) for node in nodes):g} {name}s" for name in ("CPU", "GPU"))
        each = " and ".join(f"{amount:g} {name}" for name, amount in need.items())
        raise EnvironmentFault(
            f"{workers} Ray workers with {each} each do not fit: the cluster has {has} on "
            f"{pluralize(len(nodes), 'node')}, room for {room}; ask for fewer workers, or less for each"
        )


def room_for(nodes: Iterable[Mapping[str, float]], need: Mapping[str, float]) -> int:
    """Return how many workers fit where none is spread over nodes."""
    tiny = 1e-6  # ten workers with 0.1 GPUs fit on one
    return sum(math.floor(min(node.get(name, 0.0) / amount for name, amount in need.items()) + tiny) for node in nodes)


def _require_answer(address: str) -> None:
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise UsageError(f"the Ray address {address!r} is neither auto nor host:port, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentFault(
            f"no Ray cluster answers at {address} ({error}): check the address, or start it"
        ) from error


@contextmanager
def _own_ends() -> Iterator[None]:
    """Keep this process's SIGTERM handler: Ray's own prints a stack and aborts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables that are not set, for a while."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


_SLICE = 5.0  # seconds of one wait: an interruption is seen in between
_FAREWELL = 5.0  # seconds for evaluators to give back files
_MOST_DEATHS = 2  # of workers that had the same job


class RayPool(Closing):
    """Actors, each with one evaluator at a time; they start with the first jobs.

    Args:
        workers: how many there are, each with so many `cpus` and `gpus` of one node.
        address: that of a running cluster, "auto" or host:port; None starts one on this machine, which ends with the
            pool.
        cpus: of each worker.
        gpus: of each worker.
        start_timeout: seconds that they have to start; they have no model yet.

    Raises:
        UsageError: the address is none.
        EnvironmentFault: Ray is missing, the cluster does not answer or has no room for the workers.
    """

    def __init__(
        self,
        workers: int,
        address: str | None = None,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        start_timeout: float = 600.0,
    ) -> None:
        self.ray = import_ray()
        self.workers = workers
        self.start_timeout = start_timeout
        self._idle: list[Any] = []
        self._ours = connect(self.ray, address)
        try:
            need = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
            require_room(self.ray, workers, need)
            self._kind = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Actor)
        except BaseException:
            self._disconnect()
            raise

    def run(self, factory: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Outcome[Any]]]:
        """Yield the place of every job with its outcome; `factory`, in Ray's store, builds the evaluator of a worker.

        An idle worker gets the next job. A job whose worker dies is given to another one, and is an "error" if that
        dies, too. What a job had cost that ended so is not known: its tokens are 0.

        Raises:
            EnvironmentFault: a worker did not start, or its evaluator cannot be built.
            KvsearchError: an evaluator raised it.
        """
        waiting = deque(range(len(jobs)))
        busy: dict[Any, tuple[Any, int, float]] = {}  # actor, place of its job and when it began, by task
        deaths: Counter[int] = Counter()
        try:
            while waiting or busy:
                self._start(min(len(waiting), self.workers - len(busy)))
                while waiting and len(busy) < self.workers:
                    number = waiting.popleft()
                    actor = self._idle.pop()
                    task = actor.evaluate.remote([factory], self.ray.cloudpickle.dumps(jobs[number]))
                    busy[task] = actor, number, time.monotonic()
                ready, _ = self.ray.wait(list(busy), timeout=_SLICE)
                for task in ready:
                    actor, number, start = busy.pop(task)
                    try:
                        # Pickled by the worker: arrays from Ray's store are read-only.
                        outcome = pickle.loads(self.ray.get(task))
                    except self.ray.exceptions.RayError as error:
                        self.ray.kill(actor)
                        deaths[number] += 1
                        is_short = isinstance(error, self.ray.exceptions.OutOfMemoryError)
                        if not is_short and deaths[number] < _MOST_DEATHS:
                            # First in the queue: a job that kills workers shows soon.
                            waiting.appendleft(number)
                            continue
                        what = "Ray ended its worker" if is_short else f"{_MOST_DEATHS} workers died of it"
                        message = f"{what}: {_reason(error)}"
                        outcome = Outcome("oom" if is_short else "error", None, message, time.monotonic() - start, 0)
                    else:
                        self._idle.append(actor)
                    if isinstance(outcome, KvsearchError):
                        raise outcome
                    yield number, outcome
        finally:
            for actor, _, _ in busy.values():
                self.ray.kill(actor)

    def _start(self, count: int) -> None:
        """Start actors until so many are idle."""
        actors = [self._kind.remote() for _ in range(count - len(self._idle))]
        if not actors:
            return
        starting = [actor.stop.remote() for actor in actors]
        ready, _ = self.ray.wait(starting, num_returns=len(starting), timeout=self.start_timeout)
        if len(ready) < len(actors):
            for actor in actors:
                self.ray.kill(actor)
            raise EnvironmentFault(f"a Ray worker did not start within {self.start_timeout:g} seconds")
        self._idle += actors

    def stop(self) -> None:
        """Have idle workers close their evaluators."""
        if self._idle and self.ray.is_initialized():
            leaving = [actor.stop.remote() for actor in self._idle]
            self.ray.wait(leaving, num_returns=len(leaving), timeout=_FAREWELL)

    def close(self) -> None:
        """End all actors, and the cluster if it was started here; closing again does nothing."""
        try:
            self.stop()
        finally:
            actors = self._idle
            self._idle = []
            for actor in actors:
                with suppress(self.ray.exceptions.RayError):
                    self.ray.kill(actor)
            self._disconnect()

    def _disconnect(self) -> None:
        if self._ours:
            self._ours = False
            self.ray.shutdown()


class RayExecutor(Executor[JobT, ValuesT]):
    """Runs jobs on the workers of a pool, which stay there.

    `factory` builds the evaluator of a worker: `functools.partial(function, *arguments)`, of a function that the
    workers can import. Inside it a worker with a GPU sees that one only, as `cuda:0`. Ray allows a worker as many
    threads as it has CPUs; as the number of threads decides the last bits of a result, an evaluator that should give
    the same values everywhere sets it itself.
    """

    def __init__(self, factory: Callable[[], Evaluator[JobT, ValuesT]], pool: RayPool) -> None:
        self._pool = pool
        self._factory = pool.ray.put(factory)

    def run(self, jobs: Sequence[JobT]) -> Iterator[tuple[int, Outcome[ValuesT]]]:
        return self._pool.run(self._factory, jobs)

    def close(self) -> None:
        self._pool.stop()


class _Actor:
    """The part of a worker that runs in its own process. What kvsearch raises there is returned, to be raised here.

    Jobs and outcomes are pickled: what comes from Ray's own store cannot be written to.
    """

    _factory: Any = None
    _evaluator: Any = None

    def evaluate(self, factory: list[Any], job: bytes) -> bytes:
        """Do a job with the evaluator that is built by what is stored under the `factory`, once for all its jobs."""
        try:
            # A worker keeps its model between jobs, and gives it up when other work begins.
            if factory[0] != self._factory:
                self.stop()
                self._evaluator = import_ray().get(factory[0])()
                self._factory = factory[0]
            return pickle.dumps(attempt(self._evaluator, pickle.loads(job)))
        except KvsearchError as error:
            return pickle.dumps(error)
        except Exception as error:  # noqa: BLE001 - `attempt` raises nothing else: it cannot be built
            return pickle.dumps(EnvironmentFault(f"a Ray worker cannot build its evaluator: {format_error(error)}"))

    def stop(self) -> None:
        """Close the evaluator, if there is one."""
        evaluator = self._evaluator
        self._factory = self._evaluator = None
        if evaluator is not None:
            evaluator.close()


def _reason(error: Exception) -> str:
    """Return what Ray says in one line, without its indented list of ids."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return format_error(cause)
    lines = [line for line in str(error).splitlines() if line == line.lstrip()]
    return shorten(" ".join([f"{type(error).__name__}:", *lines]))
