"""What is kept of formats, instructions and refusals: shares of what the full cache does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import RETAINED, measure_retained_gap, summarize_retained
from kvsearch.tasks.retain import RETAIN
from tests.evaluation.test_statistics import samples


def asked(full: list[float], plan: list[float], task: str = "t", category: str = RETAIN) -> list[Sample]:
    """The scores of the full cache and of a plan, a context each."""
    rows = {FULL: full, "plan": plan}
    return [
        sample for method, scores in rows.items() for sample in samples([[s] for s in scores], method, task, category)
    ]


DONE = asked([1, 1, 1, 0] * 5, [1, 0, 0, 0] * 5)  # a third of what the full cache does
OTHER = asked([1, 0] * 10, [1, 0] * 10, "other", "retrieval")


def test_a_share_is_of_what_the_full_cache_does() -> None:
    row = summarize_retained([*DONE, *OTHER], FULL)
    assert row is not None
    assert (row.task, row.questions) == (RETAINED, 20)
    assert row.scores["plan"].mean == pytest.approx(1 / 3)
    assert row.scores["plan"].low < 1 / 3 < row.scores["plan"].high
    assert (row.scores[FULL].mean, row.scores[FULL].low, row.scores[FULL].high) == (1, 1, 1)
    difference = row.differences["plan"]
    assert difference.mean == pytest.approx(2 / 3)
    assert (difference.wins, difference.ties, difference.losses) == (10, 10, 0)


def test_tasks_have_the_same_weight_and_those_that_the_full_cache_cannot_do_have_none() -> None:
    whole = asked([1, 0] * 10, [1, 0] * 10, "half")
    hardly = asked([1, 0, 0] * 7, [0] * 21, "hardly")
    row = summarize_retained([*DONE, *whole, *hardly], FULL)
    assert row is not None
    assert row.scores["plan"].mean == pytest.approx((1 / 3 + 1) / 2)
    assert summarize_retained(hardly, FULL) is None
    assert summarize_retained(OTHER, FULL) is None


def test_the_variance_of_a_share_is_that_of_a_ratio() -> None:
    """Replies that fail together with the full cache's say nothing against a method: only the others scatter."""
    rng = np.random.default_rng(0)
    draws = rng.random((200, 60, 2))
    full = (draws[..., 0] < 0.8).astype(float)
    plan = full * (draws[..., 1] < 0.6)
    rows = [summarize_retained(asked(f.tolist(), p.tolist()), FULL) for f, p in zip(full, plan, strict=True)]
    estimates = [row.scores["plan"] for row in rows if row is not None]
    covered = [estimate.low <= 0.6 <= estimate.high for estimate in estimates]
    assert 0.93 <= np.mean(covered) <= 0.995
    scatter = np.std([estimate.mean for estimate in estimates])
    assert np.mean([estimate.high - estimate.low for estimate in estimates]) == pytest.approx(4 * scatter, rel=0.1)


def test_the_gap_to_what_is_kept_of_other_scores() -> None:
    gap = measure_retained_gap([*DONE, *OTHER], "plan")
    assert gap is not None
    assert gap.mean == pytest.approx(2 / 3)
    # by hand: deviations of s - f / 3 over .75 are 0.889, -0.444, -0.444, 0 by turns; OTHER is kept whole
    deviations = np.array([8 / 9, -4 / 9, -4 / 9, 0] * 5)
    error = math.sqrt(deviations.var(ddof=1) / 20)
    assert gap.high - gap.mean == pytest.approx(2.0244 * error, rel=1e-4)  # Student's t with 38 degrees
    both = [*DONE, *asked([1, 1, 1, 0] * 5, [1, 0, 0, 0] * 5, "other", "retrieval")]
    even = measure_retained_gap(both, "plan")
    assert even is not None
    assert even.low < 0 < even.high
    assert measure_retained_gap(DONE, "plan") is None
    assert measure_retained_gap(OTHER, "plan") is None
