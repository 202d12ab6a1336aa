"""The executor on Ray, on the cores of this machine: workers that die, hang or never start change no value."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvsearch.errors import EnvironmentFault, KvsearchWarning, UsageError
from kvsearch.search.jobs import Executor
from kvsearch.search.population import evaluate_all
from kvsearch.workers import cluster
from kvsearch.workers.cluster import RayWorkers, connect, room_for
from kvsearch.workers.ray import RayExecutor
from kvsearch.workers.serial import SerialExecutor
from tests.workers import fakes
from tests.workers.contract import ExecutorContract, collect, expected, job
from tests.workers.fakes import AGES, DEADLY, DEADLY_ONCE, SLOW, TOKENS, Fake, build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray")]
SMALL = {"cpus": 0.4, "start_timeout": AGES}  # several executors, and the pool of all tests, share two cores


@pytest.fixture(scope="module")
def shared(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    with RayExecutor(partial(build, tmp_path_factory.mktemp("shared")), RayWorkers(2, **SMALL)) as executor:
        yield executor


def pids(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")}


class TestRay(ExecutorContract):
    def make(self, folder: Path) -> Executor:
        return RayExecutor(partial(build, folder), RayWorkers(1, **SMALL))

    @pytest.fixture
    def executor(self, shared: RayExecutor) -> Executor:
        return shared


def test_workers_killed_in_the_middle_change_nothing(tmp_path: Path) -> None:
    jobs = [job(number, *range(8 + number, 12 + number)) for number in range(24)]
    (tmp_path / "serial").mkdir()
    alone = evaluate_all(SerialExecutor(Fake(tmp_path / "serial")), jobs)
    killed: set[int] = set()
    finished: list[object] = []

    def kill_one(part: object, _: object) -> None:
        """Now and then: a job is done, at the latest by its second worker, before the next one is killed."""
        finished.append(part)
        if len(finished) % 6 == 3 and len(killed) < 3:
            killed.add(pid := max(pids(tmp_path) - killed))
            os.kill(pid, signal.SIGKILL)

    with RayExecutor(partial(build, tmp_path, 0.05), RayWorkers(2, **SMALL)) as executor:
        found = evaluate_all(executor, jobs, kill_one)
        assert executor.workers == 2
        nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids(tmp_path) - killed}
        assert nice == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert len(killed) == 3
    for number, outcome in found.items():
        assert outcome.kind == "ok"
        assert outcome.values is not None
        assert alone[number].values is not None
        assert outcome.values.tobytes() == alone[number].values.tobytes()
        assert outcome.tokens == alone[number].tokens == 4 * TOKENS


def test_a_job_is_given_to_a_second_worker_and_not_to_a_third(shared: RayExecutor, tmp_path: Path) -> None:
    with RayExecutor(partial(build, tmp_path), RayWorkers(1, **SMALL)) as executor:
        for number, first in enumerate((DEADLY_ONCE, DEADLY, 8)):
            executor.submit(job(number, first))
        found = collect(executor, 3)
    assert [found[number].kind for number in range(3)] == ["ok", "error", "ok"]
    assert found[1].message.startswith("two workers died of it: ")
    assert "\n" not in found[1].message
    assert len(pids(tmp_path)) == 4


def test_a_job_that_takes_too_long(tmp_path: Path) -> None:
    limits = RayWorkers(1, job_timeout=1.0, **SMALL)
    with RayExecutor(partial(build, tmp_path), limits) as executor:
        executor.submit(job(1, SLOW))
        found = collect(executor, 1)
        executor._job_timeout = None  # the next job takes as long as this machine needs
        executor.submit(job(2, 8))
        found |= collect(executor, 1)
    assert (found[1].kind, found[1].values, found[1].message) == ("timeout", None, "took longer than 1 seconds")
    assert found[1].seconds >= 1
    values = found[2].values
    assert values is not None
    assert values.tolist() == expected(job(2, 8))
    assert len(pids(tmp_path)) == 2


def test_time_in_which_nobody_asks_does_not_count(ray: Any, tmp_path: Path) -> None:
    """Whoever polls may be busy meanwhile: what is ready by then was in time."""
    with RayExecutor(partial(build, tmp_path), RayWorkers(2, job_timeout=AGES, **SMALL)) as executor:
        while any(worker.task is not None for worker in executor._workers):  # until both have started
            executor.submit(job(0, 8))
            collect(executor, 1)
        for number in range(2):
            executor.submit(job(number, 8))
        executor._hand_out()
        ray.wait([worker.task for worker in executor._workers], num_returns=2)
        for worker in executor._workers:
            worker.deadline = 0.0  # long ago
        assert {outcome.id: outcome.kind for outcome in executor.poll()} == {0: "ok", 1: "ok"}


def test_poll_waits_no_longer_than_asked(tmp_path: Path) -> None:
    with RayExecutor(partial(build, tmp_path), RayWorkers(1, **SMALL)) as executor:
        executor.submit(job(1, SLOW))
        start = time.monotonic()
        assert executor.poll(timeout=0.3) == []
        assert time.monotonic() - start >= 0.3
        assert executor.pending == 1


def test_idle_workers_take_the_next_job(tmp_path: Path) -> None:
    """One worker is held up: the other does all the rest meanwhile."""
    with RayExecutor(partial(build, tmp_path), RayWorkers(2, **SMALL)) as executor:
        executor.submit(job(0, SLOW))
        for number in range(1, 6):
            executor.submit(job(number, 8))
        assert sorted(collect(executor, 5)) == [1, 2, 3, 4, 5]
        assert executor.pending == 1


# --- workers that do not start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (fakes.refuse, "^there is no model$"),
        (fakes.stumble, "^a Ray worker cannot build its evaluator: KeyError: 'weights'$"),
        (fakes.die, "^no Ray worker is left: it died 3 times while it started, at last of ActorDiedError: "),
    ],
)
def test_an_evaluator_that_cannot_be_built(factory: Any, words: str) -> None:
    with RayExecutor(factory, RayWorkers(1, **SMALL)) as executor:
        executor.submit(job(1, 8))
        with pytest.raises(EnvironmentFault, match=words) as found:
            collect(executor, 1)
        assert "\n" not in str(found.value)
        with pytest.raises(EnvironmentFault, match="no Ray worker is left"):
            executor.poll()


def test_a_worker_that_does_not_start_in_time() -> None:
    with RayExecutor(fakes.hang, RayWorkers(1, cpus=0.5, start_timeout=0.5)) as executor:
        executor.submit(job(1, 8))
        with pytest.raises(EnvironmentFault, match=r"no Ray worker is left: it did not start within 0\.5 seconds"):
            executor.poll()


def test_the_search_goes_on_without_a_worker_that_does_not_start(tmp_path: Path) -> None:
    with RayExecutor(partial(fakes.build_one, tmp_path), RayWorkers(2, **SMALL)) as executor:
        executor.submit(job(1, 8))
        collect(executor, 1)
        [starting] = [worker for worker in executor._workers if worker.task is not None]
        starting.deadline = time.monotonic()  # the other one had all the time it needed
        executor.submit(job(2, SLOW))
        with pytest.warns(KvsearchWarning, match="goes on with 1 of 2 Ray workers, one was given up: it did not start"):
            assert executor.poll(timeout=1) == []
        assert (executor.workers, executor.pending) == (1, 1)


def test_the_search_goes_on_without_a_worker_that_cannot_be_replaced(tmp_path: Path) -> None:
    with RayExecutor(partial(fakes.build_two, tmp_path), RayWorkers(2, **SMALL)) as executor:
        executor.submit(job(1, 8, SLOW))
        executor.submit(job(2, DEADLY_ONCE))
        with pytest.warns(KvsearchWarning, match="1 of 2 Ray workers, one was given up: there is no model"):
            while executor.workers == 2:
                assert executor.poll(timeout=0.2) == []
        assert (executor.workers, executor.pending) == (1, 2)


# --- the cluster -----------------------------------------------------------------------------------------------------


def test_more_workers_than_the_cluster_can_give(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: no worker is started that would wait for its place."""
    cores = os.cpu_count()
    monkeypatch.setattr(ray, "remote", lambda *_, **__: pytest.fail("a worker was started"))
    for wanted, words in (
        (RayWorkers(1000), rf"1000 Ray workers with 1 CPU each do not fit: the cluster has {cores} CPUs, 0 GPUs on 1 "),
        (RayWorkers(1, gpus=1), "1 Ray workers with 1 CPU and 1 GPU each do not fit: .*room for 0; ask for fewer"),
    ):
        with pytest.raises(EnvironmentFault, match=words) as found:
            RayExecutor(partial(build, tmp_path), wanted)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("nodes", "need", "room"),
    [
        ([{"CPU": 8.0, "GPU": 2.0}], {"CPU": 1, "GPU": 1}, 2),
        ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}], {"GPU": 2}, 0),  # no worker spans two nodes
        ([{"CPU": 3.0}, {"CPU": 2.0}], {"CPU": 2}, 2),
        ([{"GPU": 1.0}], {"GPU": 0.1}, 10),
        ([{"CPU": 4.0}], {"GPU": 1}, 0),
        ([], {"CPU": 1}, 0),
    ],
)
def test_room(nodes: list[dict[str, float]], need: dict[str, float], room: int) -> None:
    assert room_for(nodes, need) == room


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "0 Ray workers do nothing"),
        ({"workers": 1, "cpus": 0.0}, "0 CPUs and 0 GPUs has nothing to compute on"),
        ({"workers": 1, "gpus": -1.0}, "1 CPUs and -1 GPUs"),
        ({"workers": 1, "cpus": float("nan")}, "nan CPUs"),
        ({"workers": 1, "job_timeout": 0.0}, "the job timeout of Ray workers is 0 seconds: give more than 0"),
        ({"workers": 1, "start_timeout": -5.0}, "the start timeout of Ray workers is -5 seconds"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RayWorkers(**settings)


class Unconnected:
    """Ray before `init`, which must not be reached."""

    def is_initialized(self) -> bool:
        return False


def test_addresses_at_which_there_is_no_cluster() -> None:
    for address in ("here", "ray://host:10001", "host:port", ":6379"):
        with pytest.raises(UsageError, match="is neither auto nor host:port, such as"):
            connect(Unconnected(), address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(EnvironmentFault, match=rf"no Ray cluster answers at 127.0.0.1:{port} \(.*refused"):
        connect(Unconnected(), f"127.0.0.1:{port}")


def test_what_ray_says_when_it_cannot_connect_is_one_line() -> None:
    class Failing(Unconnected):
        def init(self, *_: object, **__: object) -> None:
            raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to")

    words = r"^cannot use a Ray cluster at auto: Could not find any running Ray instance\.$"
    with pytest.raises(EnvironmentFault, match=words):
        connect(Failing(), "auto")


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cluster, "import_module", missing)
    words = r"^Ray cannot be imported \(No module named 'ray'\): run `pip install kvsearch\[ray\]`$"
    with pytest.raises(EnvironmentFault, match=words):
        RayExecutor(fakes.refuse, RayWorkers(1))


SCRIPT = """
import os, signal, sys
from functools import partial
from pathlib import Path
from kvsearch.workers.cluster import RayWorkers
from kvsearch.workers.ray import RayExecutor
from tests.workers.contract import collect, job
from tests.workers.fakes import AGES, DEADLY, build
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *told: print("told to end"))
    with RayExecutor(partial(build, Path(sys.argv[1])), RayWorkers(1, start_timeout=AGES)) as executor:
        os.kill(os.getpid(), signal.SIGTERM)
        executor.submit(job(0, DEADLY))
        executor.submit(job(1, 8))
        print(sorted(outcome.kind for outcome in collect(executor, 2).values()))
    import ray
    print(ray.is_initialized(), "RAY_USAGE_STATS_ENABLED" in os.environ)
"""


def test_a_cluster_of_its_own_is_silent_leaves_signals_alone_and_ends_with_the_executor(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "told to end\n['error', 'ok']\nFalse False\n", done.stderr
    assert done.stderr == ""
