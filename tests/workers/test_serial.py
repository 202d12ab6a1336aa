"""The executor in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.arrays import Floats
from kvsearch.search.jobs import Executor, Job
from kvsearch.workers.serial import SerialExecutor
from tests.workers.contract import ExecutorContract, expected, job
from tests.workers.fakes import Fake


class TestSerial(ExecutorContract):
    def make(self, folder: Path) -> Executor:
        return SerialExecutor(Fake(folder))

    @pytest.fixture
    def executor(self, tmp_path: Path) -> Executor:
        return self.make(tmp_path)


def test_one_job_per_poll_in_order(tmp_path: Path) -> None:
    executor = SerialExecutor(Fake(tmp_path))
    for number in (5, 2, 9):
        executor.submit(job(number, 8))
    assert executor.workers == 1
    assert [[outcome.id for outcome in executor.poll(timeout=0)] for _ in range(4)] == [[5], [2], [9], []]


def test_an_interrupted_job_is_still_pending(tmp_path: Path) -> None:
    class Interrupted(Fake):
        interrupt = True

        def evaluate(self, job: Job) -> Floats:
            if self.interrupt:
                raise KeyboardInterrupt
            return super().evaluate(job)

    evaluator = Interrupted(tmp_path)
    with SerialExecutor(evaluator) as executor:
        executor.submit(job(1, 8))
        with pytest.raises(KeyboardInterrupt):
            executor.poll()
        assert executor.pending == 1
        evaluator.interrupt = False
        [outcome] = executor.poll()
        assert outcome.values is not None
        assert outcome.values.tolist() == expected(job(1, 8))
    assert evaluator.closed


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried 8"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_counts_as_out_of_memory(tmp_path: Path, error: Exception) -> None:
    class Small(Fake):
        def evaluate(self, job: Job) -> Floats:
            raise error

    executor = SerialExecutor(Small(tmp_path))
    executor.submit(job(1, 8))
    [outcome] = executor.poll()
    assert (outcome.kind, outcome.values) == ("oom", None)


def test_out_of_memory_of_torch(tmp_path: Path) -> None:
    """Allocators of torch raise what is recognised: no machine has this much."""
    torch = pytest.importorskip("torch")

    class Huge(Fake):
        def evaluate(self, job: Job) -> Floats:
            return torch.empty(2**50, dtype=torch.float64).numpy()

    executor = SerialExecutor(Huge(tmp_path))
    executor.submit(job(1, 8))
    [outcome] = executor.poll()
    assert outcome.kind == "oom", outcome.message


def test_long_messages_are_cut(tmp_path: Path) -> None:
    class Chatty(Fake):
        def evaluate(self, job: Job) -> Floats:
            raise RuntimeError("x" * 5000)

    executor = SerialExecutor(Chatty(tmp_path))
    executor.submit(job(1, 8))
    [outcome] = executor.poll()
    assert len(outcome.message) == 303
