"""The trials of a search: what is written is read again bit for bit, what is spent, and what may fail."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import EnvironmentFault, IncompatibleError
from kvsearch.search.trials import (
    JobOutcome,
    TrialLog,
    TrialRunner,
    candidate_key,
)
from kvsearch.workers.base import SerialExecutor
from tests.workers.fakes import BROKEN, INFINITE, NAN, NO_MEMORY, Fake, table

KEYS = ["a" * 64, "b" * 64, "c" * 64]
JOB = np.array([[8, 4]]), np.array([[6, 6]])
JOB_KEYS = [candidate_key(candidate, "nll") for candidate in JOB]
OK = JobOutcome("ok", np.array([[0.1 + 0.2, 2.0], [1 / 3, -5e-324]]), "", 1.5, 40)


def result(*keys: str, outcome: str = "ok", value: float = 1.0) -> dict[str, Any]:
    values = [[value]] * len(keys) if outcome in ("ok", "non-finite") else None
    return {"keys": list(keys), "outcome": outcome, "values": values, "seconds": 1.0, "tokens": 10}


def told(generation: int = 0) -> dict[str, Any]:
    return {"stage": "group 1", "generation": generation, "points": [[1.0]], "values": [2.0]}


def test_values_that_are_not_finite_are_no_ok(tmp_path: Path) -> None:
    with TrialLog(tmp_path / "l") as ledger:
        ledger.record(JOB_KEYS, OK._replace(values=np.array([[1.0, 2.0], [0.5, math.nan]])))
        (failure,) = ledger.failed.values()
    words = "values of 1 of 2 candidates are not finite: candidate 1 of its job on sample 1"
    assert (failure.state, failure.message) == ("non-finite", words)
    assert list(ledger.trials) == JOB_KEYS[:1]


@given(st.lists(st.floats(allow_nan=True), min_size=1))
def test_values_are_kept_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("values") / "l"
    with TrialLog(path) as ledger:
        ledger.append("result", **{**result(KEYS[0], outcome="non-finite"), "values": [values]})
        ledger.append("told", **told())
    json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)  # JSON that everyone reads
    with TrialLog(path) as ledger:
        found = ledger.trials[KEYS[0]]
    np.testing.assert_array_equal(found.values, np.array(values))  # takes any NaN for any other
    assert np.array_equal(np.signbit(found.values), np.signbit(values)) or any(map(math.isnan, values))
    assert (found.state == "ok") == bool(np.isfinite(values).all())


def test_what_is_spent_is_counted_over_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "l", SimpleNamespace(now=1000.0)
    monkeypatch.setattr("kvsearch.search.trials.time", SimpleNamespace(monotonic=lambda: clock.now))
    with TrialLog(path) as ledger:
        ledger.append("result", **result(*KEYS[:2]))
        clock.now += 5
        ledger.append("result", **result(KEYS[1], KEYS[2]))
        assert (ledger.evaluations, ledger.tokens, ledger.seconds) == (3, 20, 5)
        ledger.begin("the end")
    clock.now += 100  # no work on the run
    with TrialLog(path) as ledger:
        assert (ledger.evaluations, ledger.tokens, ledger.seconds) == (3, 20, 5)
        clock.now += 2
        assert ledger.seconds == 7
        ledger.begin("again")
    ats = [json.loads(line)["at"] for line in path.read_text().splitlines()]
    assert ats == [0, 5, 5, 7]


def measure_firsts(folder: Path, firsts: Sequence[int], job: int = 1) -> TrialLog:
    """Measure candidates of `fakes`, and return the log."""
    log = TrialLog(folder / "log")
    runner = TrialRunner(SerialExecutor(Fake(folder)), log, "nll", job_size=job)
    with log:
        runner.measure([table(first) for first in firsts], log.begin("a"))
    return log


def test_exactly_half_may_fail_and_failures_count_against_the_generation(tmp_path: Path) -> None:
    log = measure_firsts(tmp_path, (BROKEN, 8))
    assert log.evaluations == 2
    assert [trial.state for trial in log.trials.values()] == ["ok"]
    with pytest.raises(EnvironmentFault) as found:
        measure_firsts(tmp_path, (BROKEN,))
    assert str(found.value) == (
        "1 of 1 candidates failed (error: ValueError: first line second line): see to it, then give the same "
        "command again to go on"
    )


def test_a_generation_that_is_mostly_not_finite_blames_the_model(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="2 of 3 candidates failed"):
        measure_firsts(tmp_path, (NAN, 8, INFINITE))


def test_of_a_job_without_a_value_all_candidates_failed(tmp_path: Path) -> None:
    """Those that failed and were not told are measured again, and nothing beside them."""
    measured = (8, 10, NO_MEMORY, 9, 11, 12)
    log = measure_firsts(tmp_path, measured, job=2)
    good = {candidate_key(table(first), "nll") for first in (8, 10, 11, 12)}
    assert {key for key, trial in log.trials.items() if trial.state == "ok"} == good
    assert log.evaluations == 6
    before = (tmp_path / "log").read_bytes()
    measure_firsts(tmp_path, measured, job=2)
    again = [json.loads(line)["keys"] for line in (tmp_path / "log").read_bytes()[len(before) :].splitlines()]
    assert again == [[candidate_key(table(first), "nll") for first in (NO_MEMORY, 9)]]


def test_a_key_depends_on_all_that_decides_the_values() -> None:
    base = candidate_key(table(8, 9), "nll")
    assert base == candidate_key(np.array([[8], [9]]), "nll")
    others = [
        candidate_key(table(9, 8), "nll"),
        candidate_key(np.array([[8, 9]]), "nll"),
        candidate_key(table(8, 9), "metric"),
    ]
    assert len({base, *others}) == 4
