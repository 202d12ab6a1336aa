"""The executor in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsearch.core.arrays import Floats
from kvsearch.search.trials import Executor, Tables
from kvsearch.workers.base import SerialExecutor, attempt
from tests.workers.contract import ExecutorContract, job
from tests.workers.fakes import Fake


class TestSerial(ExecutorContract):
    def make(self, folder: Path) -> Executor:
        return SerialExecutor(Fake(folder))

    @pytest.fixture
    def executor(self, tmp_path: Path) -> Executor:
        return self.make(tmp_path)


def test_out_of_memory_of_torch(tmp_path: Path) -> None:
    """Allocators of torch raise what is recognised: no machine has this much."""

    class Huge(Fake):
        def evaluate(self, job: Tables) -> Floats:
            return torch.empty(2**50, dtype=torch.float64).numpy()

    outcome = attempt(Huge(tmp_path), job(1, 8))
    assert outcome.kind == "oom", outcome.message
