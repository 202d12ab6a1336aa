"""What candidates are worth: known or measured, and never more than allowed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kvsearch.search.ledger import SearchLedger
from kvsearch.search.scoring import LimitReachedError, Scoring
from kvsearch.search.settings import SearchLimits
from kvsearch.workers.serial import SerialExecutor
from tests.search.searching import SAMPLES, TOKENS, Measure

TABLES = [np.full((2, 1), entries, dtype=np.int64) for entries in range(5, 12)]


def scoring(ledger: SearchLedger, measure: Measure, objective: str = "nll", job: int = 3, **limits: float) -> Scoring:
    return Scoring(
        SerialExecutor(measure), ledger, objective, job, SearchLimits(**limits),
        lambda chosen: TOKENS * (SAMPLES if chosen is None else len(chosen)),
    )  # fmt: skip


def test_means_that_are_to_be_minimised(tmp_path: Path) -> None:
    measure = Measure(lambda table, sample: float(table[0, 0]) + sample)
    with SearchLedger(tmp_path / "l") as ledger:
        line = ledger.append("stage", name="a", begins=True)
        assert scoring(ledger, measure)(TABLES[:2], line) == [7.5, 8.5]
        assert scoring(ledger, measure)(TABLES[:1], line, (0, 4)) == [7.0]
        assert scoring(ledger, measure, "metric")(TABLES[:1], line) == [-7.5]


def test_jobs_are_of_about_equal_size(tmp_path: Path) -> None:
    measure = Measure()
    with SearchLedger(tmp_path / "l") as ledger:
        scoring(ledger, measure)(TABLES, ledger.append("stage", name="a", begins=True))
    assert [len(job.candidates) for job in measure.jobs] == [2, 2, 3]


def test_equal_candidates_are_measured_once_and_all_told(tmp_path: Path) -> None:
    measure = Measure()
    with SearchLedger(tmp_path / "l") as ledger:
        line = ledger.append("stage", name="a", begins=True)
        values = scoring(ledger, measure)([TABLES[0], TABLES[1], TABLES[0]], line)
    assert len(measure.candidates) == 2
    assert values[0] == values[2] != values[1]


def test_what_is_not_known_is_not_a_number(tmp_path: Path) -> None:
    measure = Measure(lambda table, _: math.nan if table[0, 0] == 6 else 1.0)
    with SearchLedger(tmp_path / "l") as ledger:
        score = scoring(ledger, measure)
        score(TABLES[:5], ledger.append("stage", name="a", begins=True))
        np.testing.assert_equal(score.known(TABLES[:3] + TABLES[6:]), [1.0, math.nan, 1.0, math.nan])


def test_a_job_is_the_same_whatever_of_it_was_known_before_it_was_cut(tmp_path: Path) -> None:
    """What a generation has measured stays among its jobs, so those that are left are as they were."""
    whole = Measure()
    with SearchLedger(tmp_path / "whole") as ledger:
        scoring(ledger, whole)(TABLES, ledger.append("stage", name="a", begins=True))
    measure = Measure(interrupt=1)
    with SearchLedger(tmp_path / "l") as ledger:
        line, score = ledger.append("stage", name="a", begins=True), scoring(ledger, measure)
        with pytest.raises(KeyboardInterrupt):
            score(TABLES, line)
        scoring(ledger, measure)(TABLES, line)
    assert [[t.tolist() for t in job.candidates] for job in measure.jobs] == [
        [t.tolist() for t in job.candidates] for job in whole.jobs
    ]


@pytest.mark.parametrize(
    ("limits", "measured", "message"),
    [
        ({"evaluations": 4}, 4, "4 candidates were evaluated, as many as allowed"),
        ({"tokens": 4 * SAMPLES * TOKENS + 1}, 4, "240 tokens were read, and one more candidate could exceed 241"),
        ({"seconds": 1e-9}, 0, "the 1e-09 seconds that were allowed are over"),
    ],
)
def test_limits(limits: dict[str, float], measured: int, message: str, tmp_path: Path) -> None:
    measure = Measure()
    with SearchLedger(tmp_path / "l") as ledger:
        score = scoring(ledger, measure, **limits)
        line = ledger.append("stage", name="a", begins=True)
        for _ in range(2):  # and again
            with pytest.raises(LimitReachedError, match=message):
                score(TABLES, line)
        assert len(measure.candidates) == measured
        assert np.isfinite(score.known(TABLES)).sum() == measured


def test_what_is_known_may_be_asked_beyond_the_limit(tmp_path: Path) -> None:
    with SearchLedger(tmp_path / "l") as ledger:
        line = ledger.append("stage", name="a", begins=True)
        values = scoring(ledger, Measure())(TABLES, line)
        assert scoring(ledger, Measure(), seconds=1e-9)(TABLES, line) == values
