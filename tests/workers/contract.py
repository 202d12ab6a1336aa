"""What every executor does; a test class per executor inherits this and gives an executor over `fakes.Fake`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvsearch.core.errors import UsageError
from kvsearch.search.trials import Executor, Tables
from tests.workers.fakes import BROKEN, NO_MEMORY, SAMPLES, TOKENS, WRONG, table, value_of


def job(number: int, *firsts: int) -> Tables:
    return tuple(table(first, number) for first in firsts)


def expected(tables: Tables) -> list[list[float]]:
    return [[value_of(candidate, sample) for sample in range(SAMPLES)] for candidate in tables]


class ExecutorContract:
    def make(self, folder: Path) -> Executor:
        """An executor that the test closes."""
        raise NotImplementedError

    @pytest.fixture
    def executor(self) -> Executor:
        """An executor that may be shared by tests."""
        raise NotImplementedError

    def test_every_job_gets_its_values_bit_for_bit(self, executor: Executor) -> None:
        jobs = [job(number, 8 + number, *[16] * (number % 2)) for number in range(8)]
        outcomes = dict(executor.run(jobs))
        assert sorted(outcomes) == list(range(8))
        for number, one in enumerate(jobs):
            outcome = outcomes[number]
            assert (outcome.kind, outcome.message, outcome.tokens) == ("ok", "", TOKENS * len(one))
            assert outcome.values.dtype == np.float64
            assert outcome.values.tolist() == expected(one)
            assert outcome.seconds >= 0

    @pytest.mark.parametrize(
        ("firsts", "kind", "message"),
        [
            ((NO_MEMORY,), "oom", "MemoryError: "),
            ((8, 8, 8, 8, 8), "oom", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 MiB"),
            ((8, BROKEN), "error", "ValueError: first line second line"),
        ],
    )
    def test_failures_are_outcomes(self, executor: Executor, firsts: tuple[int, ...], kind: str, message: str) -> None:
        outcomes = dict(executor.run([job(1, *firsts), job(2, 8)]))
        assert outcomes[0].kind == kind
        assert outcomes[0].message.startswith(message.strip())
        assert "\n" not in outcomes[0].message
        assert outcomes[0].tokens == TOKENS * len(firsts)
        assert outcomes[1].kind == "ok"

    def test_what_would_fail_for_every_candidate_is_raised(self, executor: Executor) -> None:
        with pytest.raises(UsageError, match=r"^sample 7 has no answer: leave it out$"):
            list(executor.run([job(1, WRONG)]))
        assert [outcome.kind for _, outcome in executor.run([job(1, 8)])] == ["ok"]

    def test_closing_lets_evaluators_tidy_up(self, tmp_path: Path) -> None:
        executor = self.make(tmp_path)
        list(executor.run([job(1, 8)]))
        executor.close()
        executor.close()
        assert list(tmp_path.glob("closed-*"))
