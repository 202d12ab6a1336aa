"""The paper's fitness: worked examples, then what it does to rankings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.search.loop import cache_score, fitness, loss_score


@pytest.mark.parametrize(
    ("mean", "score"),
    [(0, 0.8), (64, 0.9), (96, 0.95), (128, 1.0), (160, 0.75), (192, 0.5), (256, 0.0), (300, 0.0)],
)
def test_cache_scores_at_128(mean: float, score: float) -> None:
    assert cache_score(mean, 128) == pytest.approx(score)


def test_gamma_discounts_what_is_left_unused() -> None:
    assert cache_score(64, 128, gamma=1.0) == pytest.approx(0.5)
    assert cache_score(160, 128, gamma=1.0) == cache_score(160, 128)


def test_a_quarter_over_budget_costs_six_percent_and_a_quarter_under_it_one() -> None:
    at_budget, over, under = (fitness(50.0, cache_score(mean, 128)) for mean in (128, 160, 96))
    assert at_budget == pytest.approx(50 * 1.3)
    assert over == pytest.approx(50 * 1.225)
    assert over / at_budget - 1 == pytest.approx(-0.0577, abs=5e-5)
    assert under / at_budget - 1 == pytest.approx(-0.0115, abs=5e-5)
    assert math.log(at_budget / over) == pytest.approx(0.059, abs=5e-4)


def test_the_unit_of_a_score_and_a_shift_of_a_loss_are_factors() -> None:
    cache = cache_score(100, 128)
    assert fitness(0.41, cache) * 100 == pytest.approx(fitness(41.0, cache))
    assert fitness(loss_score(2.5), cache) * math.exp(0.7) == pytest.approx(fitness(loss_score(1.8), cache))
    assert fitness(0.0, 1.0) == fitness(0.0, 0.0) == 0.0


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 1))
def test_less_loss_is_fitter_at_the_same_budget(one: float, other: float, cache: float) -> None:
    less, more = sorted((one, other))
    assert fitness(loss_score(less), cache) >= fitness(loss_score(more), cache) > 0


def test_a_failed_candidate_stays_failed() -> None:
    assert math.isnan(fitness(math.nan, 1.0))
    assert math.isnan(fitness(loss_score(math.nan), 1.0))
