"""The workers on Ray, on the cores of this machine: workers that die or cannot start change no value."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.search.trials import Executor, JobOutcome
from kvsearch.workers.base import attempt
from kvsearch.workers.ray import RayExecutor, RayPool, connect, room_for
from tests.workers import fakes
from tests.workers.contract import ExecutorContract, job
from tests.workers.fakes import AGES, DEADLY, DEADLY_ONCE, SLOW, TOKENS, Fake, build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray")]


@pytest.fixture(scope="module")
def pool(ray: Any) -> Iterator[RayPool]:
    """Two workers beside those of all tests, which share two cores with them."""
    with RayPool(2, cpus=0.4, start_timeout=AGES) as workers:
        yield workers


@pytest.fixture(scope="module")
def shared(pool: RayPool, tmp_path_factory: pytest.TempPathFactory) -> RayExecutor:
    return RayExecutor(partial(build, tmp_path_factory.mktemp("shared")), pool)


def pids(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")}


class TestRay(ExecutorContract):
    @pytest.fixture(autouse=True)
    def _pool(self, pool: RayPool) -> None:
        self.pool = pool

    def make(self, folder: Path) -> Executor:
        return RayExecutor(partial(build, folder), self.pool)

    @pytest.fixture
    def executor(self, shared: RayExecutor) -> Executor:
        return shared


@pytest.mark.nightly
def test_workers_killed_in_the_middle_change_nothing(pool: RayPool, tmp_path: Path) -> None:
    jobs = [job(number, *range(8 + number, 12 + number)) for number in range(24)]
    (tmp_path / "serial").mkdir()
    alone = [attempt(Fake(tmp_path / "serial"), one) for one in jobs]
    killed: set[int] = set()
    outcomes: dict[int, JobOutcome] = {}
    for number, outcome in RayExecutor(partial(build, tmp_path, 0.05), pool).run(jobs):
        outcomes[number] = outcome
        # a job is done, at the latest by its second worker, before the next one is killed
        if len(outcomes) % 6 == 3 and len(killed) < 3:
            killed.add(pid := max(pids(tmp_path) - killed))
            os.kill(pid, signal.SIGKILL)
    nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids(tmp_path) - killed}
    assert nice == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert len(killed) == 3
    assert sorted(outcomes) == list(range(24))
    for number, outcome in outcomes.items():
        assert outcome.kind == "ok"
        assert outcome.values.tobytes() == alone[number].values.tobytes()
        assert outcome.tokens == alone[number].tokens == 4 * TOKENS


@pytest.mark.nightly
def test_a_job_is_given_to_a_second_worker_and_not_to_a_third(pool: RayPool, tmp_path: Path) -> None:
    jobs = [job(number, first) for number, first in enumerate((DEADLY_ONCE, DEADLY, 8))]
    outcomes = dict(RayExecutor(partial(build, tmp_path), pool).run(jobs))
    assert [outcomes[number].kind for number in range(3)] == ["ok", "error", "ok"]
    assert outcomes[1].message.startswith("2 workers died of it: ")
    assert "\n" not in outcomes[1].message


@pytest.mark.nightly
def test_idle_workers_take_the_next_job(pool: RayPool, tmp_path: Path) -> None:
    """One worker is held up: the other does all the rest meanwhile; who is busy at the end is ended."""
    outcomes = RayExecutor(partial(build, tmp_path), pool).run([job(0, SLOW), *(job(n, 8) for n in range(1, 6))])
    assert sorted(next(outcomes)[0] for _ in range(5)) == [1, 2, 3, 4, 5]
    outcomes.close()  # type: ignore[attr-defined]
    assert [outcome.kind for _, outcome in RayExecutor(partial(build, tmp_path), pool).run([job(0, 8)] * 3)] == [
        "ok"
    ] * 3


@pytest.mark.nightly
def test_an_evaluator_that_cannot_be_built(pool: RayPool) -> None:
    for factory, words in (
        (fakes.refuse, "^there is no model$"),
        (fakes.stumble, "^a Ray worker cannot build its evaluator: KeyError: 'weights'$"),
    ):
        with pytest.raises(EnvironmentFault, match=words):
            list(RayExecutor(factory, pool).run([job(1, 8)]))


@pytest.mark.nightly
def test_a_worker_that_does_not_start_in_time(ray: Any) -> None:
    words = r"a Ray worker did not start within 0\.001 seconds"
    with RayPool(1, cpus=0.1, start_timeout=0.001) as pool, pytest.raises(EnvironmentFault, match=words):
        list(RayExecutor(fakes.refuse, pool).run([job(1, 8)]))


@pytest.mark.nightly
def test_more_workers_than_the_cluster_can_give(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: no worker is started that would wait for its place."""
    cores = os.cpu_count()
    monkeypatch.setattr(ray, "remote", lambda *_, **__: pytest.fail("a worker was started"))
    for wanted, gpus, words in (
        (1000, 0, rf"1000 Ray workers with 1 CPU each do not fit: the cluster has {cores} CPUs, 0 GPUs on 1 "),
        (1, 1, "1 Ray workers with 1 CPU and 1 GPU each do not fit: .*room for 0; ask for fewer"),
    ):
        with pytest.raises(EnvironmentFault, match=words) as found:
            RayPool(wanted, gpus=gpus)
        assert "\n" not in str(found.value)


def test_room() -> None:
    assert room_for([{"CPU": 8.0, "GPU": 2.0}], {"CPU": 1, "GPU": 1}) == 2
    assert room_for([{"CPU": 8.0, "GPU": 1.0}] * 2, {"GPU": 2}) == 0  # no worker spans two nodes
    assert room_for([{"CPU": 3.0}, {"CPU": 2.0}], {"CPU": 2}) == 2
    assert room_for([{"GPU": 1.0}], {"GPU": 0.1}) == 10
    assert room_for([], {"CPU": 1}) == 0


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


SCRIPT = """
import os, signal, sys
from functools import partial
from pathlib import Path
from kvsearch.workers.ray import RayExecutor, RayPool
from tests.workers.contract import job
from tests.workers.fakes import AGES, DEADLY, build
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *told: print("told to end"))
    with RayPool(1, start_timeout=AGES) as pool:
        os.kill(os.getpid(), signal.SIGTERM)
        outcomes = RayExecutor(partial(build, Path(sys.argv[1])), pool).run([job(0, DEADLY), job(1, 8)])
        print(sorted(outcome.kind for _, outcome in outcomes))
    import ray
    print(ray.is_initialized(), "RAY_USAGE_STATS_ENABLED" in os.environ)
"""


@pytest.mark.nightly
def test_a_cluster_of_its_own_is_silent_leaves_signals_alone_and_ends_with_the_pool(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "told to end\n['error', 'ok']\nFalse False\n", done.stderr
    assert done.stderr == ""
