"""What every executor does; a test class per executor inherits this and gives an executor over `fakes.Fake`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvsearch.errors import EnvironmentFault, IncompatibleError, InternalError, UsageError
from kvsearch.search.jobs import Executor, Job, JobOutcome
from kvsearch.search.population import evaluate_all
from tests.workers.fakes import BROKEN, INFINITE, MISSHAPEN, NAN, NO_MEMORY, TOKENS, WRONG, table, value_of


def job(number: int, *firsts: int, samples: tuple[int, ...] | None = (0, 2)) -> Job:
    return Job(number, tuple(table(first, number) for first in firsts), samples, "nll")


def expected(one: Job) -> list[list[float]]:
    samples = range(3) if one.samples is None else one.samples
    return [[value_of(candidate, sample) for sample in samples] for candidate in one.candidates]


def collect(executor: Executor, count: int) -> dict[int, JobOutcome]:
    """Poll until `count` outcomes are there."""
    found: dict[int, JobOutcome] = {}
    while len(found) < count:
        assert executor.pending, "outcomes are missing"
        for outcome in executor.poll(timeout=5):
            assert outcome.id not in found
            found[outcome.id] = outcome
    return found


class ExecutorContract:
    def make(self, folder: Path) -> Executor:
        """An executor that the test closes."""
        raise NotImplementedError

    @pytest.fixture
    def executor(self) -> Executor:
        """An executor that may be shared by tests, each of which leaves nothing pending."""
        raise NotImplementedError

    def test_every_job_gets_its_values_bit_for_bit(self, executor: Executor) -> None:
        jobs = [job(number, 8 + number, 16, samples=(0, 5)[: 1 + number % 2]) for number in range(7)]
        jobs.append(job(99, 8, samples=None))
        for one in jobs:
            executor.submit(one)
        assert executor.pending == 8
        found = collect(executor, 8)
        for one in jobs:
            outcome = found[one.id]
            assert (outcome.kind, outcome.message, outcome.tokens) == ("ok", "", TOKENS * len(one.candidates))
            assert outcome.values is not None
            assert outcome.values.dtype == np.float64
            assert outcome.values.tolist() == expected(one)
            assert outcome.seconds >= 0
        assert executor.pending == 0

    def test_nothing_pending_gives_nothing_at_once(self, executor: Executor) -> None:
        """A wait would never end."""
        assert executor.poll() == []
        assert executor.poll(timeout=10**6) == []

    def test_an_id_is_free_again_once_its_outcome_was_handed_out(self, executor: Executor) -> None:
        executor.submit(job(1, 8))
        with pytest.raises(InternalError, match="cannot submit job 1: a pending job has its id"):
            executor.submit(job(1, 9))
        collect(executor, 1)
        executor.submit(job(1, 9))
        values = collect(executor, 1)[1].values
        assert values is not None
        assert values.tolist() == expected(job(1, 9))

    def test_a_job_needs_candidates(self, executor: Executor) -> None:
        with pytest.raises(InternalError, match="job 3: it has no candidates"):
            executor.submit(job(3))
        assert executor.pending == 0

    @pytest.mark.parametrize(
        ("firsts", "kind", "message"),
        [
            ((NO_MEMORY,), "oom", "MemoryError: "),
            ((8, 8, 8, 8, 8), "oom", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 MiB"),
            ((8, BROKEN), "error", "ValueError: first line second line"),
            ((8, NAN, 9), "non-finite", "values of candidates 1 of 3 are not finite: candidate 1 has nan on sample 1"),
            ((INFINITE, NAN), "non-finite", "values of candidates 0, 1 of 2 are not finite: candidate 0 has inf"),
        ],
    )
    def test_failures_are_outcomes(self, executor: Executor, firsts: tuple[int, ...], kind: str, message: str) -> None:
        executor.submit(job(1, *firsts))
        executor.submit(job(2, 8))
        found = collect(executor, 2)
        assert found[1].kind == kind
        assert found[1].message.startswith(message.strip())
        assert "\n" not in found[1].message
        assert found[1].tokens == TOKENS * len(firsts)
        assert found[2].kind == "ok"

    def test_values_beside_those_that_are_not_finite_are_kept(self, executor: Executor) -> None:
        executor.submit(job(1, 8, NAN))
        values = collect(executor, 1)[1].values
        assert values is not None
        assert values[0].tolist() == expected(job(1, 8))[0]
        assert np.isfinite(values[1]).tolist() == [True, False]

    def test_what_would_fail_for_every_candidate_is_raised(self, executor: Executor) -> None:
        executor.submit(job(1, WRONG))
        with pytest.raises(UsageError, match=r"^sample 7 has no answer: leave it out$"):
            collect(executor, 1)
        assert executor.pending == 0
        executor.submit(job(1, 8))
        assert collect(executor, 1)[1].kind == "ok"

    def test_values_of_another_shape_are_a_bug(self, executor: Executor) -> None:
        executor.submit(job(4, MISSHAPEN, 8))
        with pytest.raises(InternalError, match=r"values of shape \[2\] for job 4, not \[2, 2\]"):
            collect(executor, 1)

    def test_closing(self, tmp_path: Path) -> None:
        executor = self.make(tmp_path)
        assert executor.workers >= 1
        executor.submit(job(1, 8))
        collect(executor, 1)
        executor.submit(job(2, 8))
        executor.close()
        executor.close()
        assert executor.pending == 0
        assert list(tmp_path.glob("closed-*"))  # the evaluator could tidy up
        with pytest.raises(InternalError, match="cannot submit job 3: the executor is closed"):
            executor.submit(job(3, 8))
        with pytest.raises(InternalError, match="cannot poll an executor that is closed"):
            executor.poll()

    def test_a_population_that_does_not_fit_is_split(self, executor: Executor) -> None:
        jobs = [job(3, *range(8, 19)), job(5, 8, NO_MEMORY, 9, 10, 11, 12), job(6, 7)]
        kept: list[tuple[int, int, str]] = []
        found = evaluate_all(
            executor, jobs, lambda part, outcome: kept.append((part.id, len(part.candidates), outcome.kind))
        )
        assert {number: outcome.kind for number, outcome in found.items()} == {3: "ok", 5: "oom", 6: "ok"}
        for one in jobs:
            values = found[one.id].values
            assert values is not None
            for row, wanted, candidate in zip(values, expected(one), one.candidates, strict=True):
                assert np.isnan(row).all() if candidate[0, 0] == NO_MEMORY else row.tolist() == wanted
        assert sorted(kept) == [
            (3, 2, "ok"), (3, 3, "ok"), (3, 3, "ok"), (3, 3, "ok"),
            (5, 1, "ok"), (5, 1, "ok"), (5, 1, "oom"), (5, 3, "ok"), (6, 1, "ok"),
        ]  # fmt: skip

    def test_when_most_of_a_generation_fails_the_search_stops(self, tmp_path: Path) -> None:
        for firsts, error, words in (
            ((8, NO_MEMORY, BROKEN, 9, BROKEN), EnvironmentFault, "3 of 5 candidates failed (oom: MemoryError:"),
            ((NAN, 8, INFINITE), IncompatibleError, "2 of 3 candidates failed (non-finite: values of candidates 0"),
        ):
            with self.make(tmp_path) as executor, pytest.raises(error) as found:
                evaluate_all(executor, [job(number, first) for number, first in enumerate(firsts)])
            assert "\n" not in str(found.value)
            if executor.workers == 1:
                assert str(found.value).startswith(words)
