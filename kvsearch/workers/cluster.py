"""The Ray cluster that workers live in: reached or started, and known to have room before anything waits for it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvsearch.core.errors import EnvironmentFault, UsageError

_REACH = 10.0  # seconds for a cluster to answer at all
_STORE = 256 * 2**20  # bytes that workers of this machine share: jobs and values are small


@dataclass(frozen=True)
class RayWorkers:
    """How many workers, each with so many `cpus` and `gpus` of one node, and how many seconds they have to start.

    `address` is that of a running cluster, "auto" or host:port; None starts one on this machine, which ends with the
    pool. A worker that starts has no model yet.
    """

    workers: int
    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None
    start_timeout: float = 600.0

    @property
    def need(self) -> dict[str, float]:
        """What one worker takes, by Ray's names."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


def import_ray() -> Any:
    """Import Ray so that it does not print what raylets report; what dies is reported here.

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


def require_room(ray: Any, wanted: RayWorkers) -> None:
    """Raise EnvironmentFault, with what is there, if the nodes of the cluster cannot hold all workers."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(nodes, wanted.need)
    if room < wanted.workers:
        has = ", ".join(f"{sum(node.get(name, 0.0) for node in nodes):g} {name}s" for name in ("CPU", "GPU"))
        each = " and ".join(f"{amount:g} {name}" for name, amount in wanted.need.items())
        raise EnvironmentFault(
            f"{wanted.workers} Ray workers with {each} each do not fit: the cluster has {has} on {len(nodes)} "
            f"node{'s' if len(nodes) != 1 else ''}, room for {room}; ask for fewer workers, or less for each"
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
    """Go on to end by SIGTERM as this process did before: Ray's own handler prints a stack and aborts."""
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
