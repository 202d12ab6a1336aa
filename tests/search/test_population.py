"""A generation through an executor: splitting, what is known, failures and their value."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import EnvironmentFault, InternalError, UsageError
from kvsearch.search.jobs import Job, JobOutcome, Result, candidate_key, keys_of, results_of
from kvsearch.search.population import evaluate_all, worst_of
from kvsearch.workers.serial import SerialExecutor
from tests.workers.contract import expected, job
from tests.workers.fakes import BROKEN, NAN, NO_MEMORY, TOKENS, Fake, table


class Kept:
    """What `keep` was given, as a ledger would have it."""

    def __init__(self) -> None:
        self.known: dict[str, Result] = {}
        self.parts: list[tuple[int, ...]] = []
        self.tokens = 0

    def __call__(self, part: Job, outcome: JobOutcome) -> None:
        self.parts.append(tuple(int(candidate[0, 0]) for candidate in part.candidates))
        self.known.update(zip(keys_of(part), results_of(outcome, len(part.candidates)), strict=True))
        self.tokens += outcome.tokens


def run(folder: Path, jobs: Sequence[Job], known: dict[str, Result], keep: Kept) -> dict[int, JobOutcome]:
    return evaluate_all(SerialExecutor(Fake(folder)), jobs, keep, known)


def test_what_is_known_is_not_evaluated_again_and_the_parts_stay_the_same(tmp_path: Path) -> None:
    """Cut off after any number of parts: the rest is done in the same parts, so that no bit can differ."""
    jobs = [job(0, *range(8, 19)), job(1, 20, NO_MEMORY, 21, 22, 23), job(2, 30, 31), job(3, 40, NAN)]
    whole = Kept()
    outcomes = run(tmp_path, jobs, {}, whole)
    assert len(whole.parts) == 9
    for count in (0, 3, 5, 9):
        done = {key for part in whole.parts[:count] for key, first in named(jobs) if first in part}
        again = Kept()
        known = {key: result for key, result in whole.known.items() if key in done}
        found = run(tmp_path, jobs, known, again)
        assert sorted(again.parts) == sorted(whole.parts[count:])
        for number, outcome in outcomes.items():
            np.testing.assert_array_equal(found[number].values, outcome.values)
            assert found[number].kind == outcome.kind


def named(jobs: Sequence[Job]) -> list[tuple[str, int]]:
    firsts = [int(candidate[0, 0]) for one in jobs for candidate in one.candidates]
    return list(zip([key for one in jobs for key in keys_of(one)], firsts, strict=True))


def test_attempts_that_did_not_fit_are_paid_for(tmp_path: Path) -> None:
    kept = Kept()
    [outcome] = run(tmp_path, [job(7, *range(8, 17))], {}, kept).values()  # 9 = 4 + (2 + 3)
    assert kept.parts == [(8, 9, 10, 11), (12, 13), (14, 15, 16)]
    assert kept.tokens == outcome.tokens == TOKENS * (9 + 4 + 5 + 2 + 3)
    assert outcome.id == 7
    assert outcome.seconds > 0


def test_a_job_of_which_nothing_is_left_has_no_values(tmp_path: Path) -> None:
    jobs = [job(0, NO_MEMORY), job(1, 8)]
    found = run(tmp_path, jobs, {}, Kept())
    assert found[0].values is None
    assert found[0].kind == "oom"
    values = found[1].values
    assert values is not None
    assert values.tolist() == expected(jobs[1])


def test_exactly_half_may_fail_and_failures_count_against_the_generation(tmp_path: Path) -> None:
    jobs = [job(0, BROKEN), job(1, 8)]
    assert run(tmp_path, jobs, {}, Kept())[0].kind == "error"
    executor = SerialExecutor(Fake(tmp_path))
    with pytest.raises(EnvironmentFault) as found:
        evaluate_all(executor, jobs[:1])
    assert str(found.value) == (
        "1 of 1 candidates failed (error: ValueError: first line second line): see to it, then go on with --resume"
    )
    assert evaluate_all(executor, jobs[:1], generation=8)[0].kind == "error"


def test_known_failures_count_too(tmp_path: Path) -> None:
    jobs = [job(0, BROKEN), job(1, NO_MEMORY), job(2, 8)]
    failure = Result("timeout", None, 1.0, "took longer than 3 seconds")
    with pytest.raises(EnvironmentFault, match="2 of 3 candidates failed"):
        run(tmp_path, jobs, {keys_of(jobs[1])[0]: failure}, Kept())


def test_only_the_first_messages_are_told(tmp_path: Path) -> None:
    class Talkative(Fake):
        def evaluate(self, job: Job) -> np.ndarray:
            raise ValueError(str(job.id))

    with pytest.raises(EnvironmentFault) as found:
        evaluate_all(SerialExecutor(Talkative(tmp_path)), [job(number, 8) for number in range(8)])
    told = "error: ValueError: 0; error: ValueError: 1; error: ValueError: 2; and 2 more"
    assert str(found.value).startswith(f"5 of 8 candidates failed ({told})")


def test_jobs_of_someone_else(tmp_path: Path) -> None:
    executor = SerialExecutor(Fake(tmp_path))
    with pytest.raises(InternalError, match="jobs with different ids"):
        evaluate_all(executor, [job(1, 8), job(1, 9)])
    executor.submit(job(1, 8))
    with pytest.raises(InternalError, match="an executor without pending jobs"):
        evaluate_all(executor, [job(2, 8)])


def test_a_key_depends_on_all_that_decides_the_values() -> None:
    base = candidate_key(table(8, 9), "nll", (0, 1))
    assert base == candidate_key(np.array([[8], [9]]), "nll", (0, 1))
    others = [
        candidate_key(table(9, 8), "nll", (0, 1)),
        candidate_key(np.array([[8, 9]]), "nll", (0, 1)),
        candidate_key(table(8, 9), "kl", (0, 1)),
        candidate_key(table(8, 9), "nll", (0,)),
        candidate_key(table(8, 9), "nll", (1, 0)),
        candidate_key(table(8, 9), "nll", None),
    ]
    assert len({base, *others}) == 7


# --- the value of a failure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "worst"),
    [
        ([2.0], 4.0),  # its own size away
        ([0.25], 1.25),  # at least 1
        ([-8.0, 8.0], 24.0),  # the spread
        ([-5.0], 0.0),
        ([1.0, math.nan, math.inf, 3.0], 6.0),
        ([sys.float_info.max], sys.float_info.max),
    ],
)
def test_the_value_of_a_failure(values: list[float], worst: float) -> None:
    assert worst_of(values) == worst


@given(st.lists(st.floats(-1e300, 1e300), min_size=1))
def test_a_failure_is_worse_than_everything_and_finite(values: list[float]) -> None:
    assert math.isfinite(worst_of(values))
    assert worst_of(values) > max(values)


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_nothing_to_be_worse_than(values: list[float]) -> None:
    with pytest.raises(UsageError, match="no candidate of the generation has a finite value"):
        worst_of(values)
