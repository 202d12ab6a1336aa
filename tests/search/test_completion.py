"""Completion and extrapolation of budgets: the worked examples, then what holds for all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from kvsearch.search.completion import complete, extrapolate


@pytest.mark.parametrize(
    ("budgets", "literal", "exact"),
    [
        ([101, 50, 30, 20], [121, 60, 36, 24], [120, 60, 36, 24]),
        ([100, 50, 30, 20], [120, 60, 36, 24], [120, 60, 36, 24]),
        ([60, 60, 60, 60], [60, 60, 60, 60], [60, 60, 60, 60]),
        ([480, 0, 0, 0], [240, 0, 0, 0], [240, 0, 0, 0]),
        ([1, 1, 1, 4], [35, 35, 35, 138], [35, 34, 34, 137]),  # 240 / 7 = 34.29, 960 / 7 = 137.14
    ],
)
def test_worked_examples_for_an_average_of_60(budgets: list[int], literal: list[int], exact: list[int]) -> None:
    given = np.array(budgets)
    assert complete(given, 240, literal=True).tolist() == literal
    completed = complete(given, 240)
    assert completed.sum() == 240
    assert np.abs(completed - given * 240 / given.sum()).max() < 1
    assert completed.tolist() == exact


def test_the_literal_overshoot_is_up_to_one_entry_less_than_there_are_layers() -> None:
    overshoot = [int(complete(np.array([1, 1, 1, 1 + more]), 240, literal=True).sum()) - 240 for more in range(200)]
    assert min(overshoot) == 0
    assert max(overshoot) == 3


def test_heads_are_treated_like_layers() -> None:
    table = np.array([[101, 101], [50, 50], [30, 30], [20, 20]])
    assert complete(table, 480, literal=True).tolist() == [[121, 121], [60, 60], [36, 36], [24, 24]]
    assert complete(table, 480).sum() == 480


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40).filter(any), st.integers(1, 500))
def test_shares_stay_and_the_sum_is_exact(budgets: list[int], average: int) -> None:
    given, total = np.array(budgets), average * len(budgets)
    exact, literal = complete(given, total), complete(given, total, literal=True)
    assert exact.sum() == total
    assert 0 <= literal.sum() - total <= len(budgets) - 1
    shares = given * total / given.sum()
    assert np.abs(exact - shares).max() < 1 + 1e-6
    assert (literal >= exact).all()


def test_bounds_bind_without_losing_entries() -> None:
    given = np.array([101, 50, 30, 20])
    assert complete(given, 240, floors=30).tolist() == [117, 58, 35, 30]  # 210 in shares of 101 : 50 : 30
    assert complete(given, 240, caps=100).tolist() == [100, 70, 42, 28]  # 140 in shares of 5 : 3 : 2
    assert complete(given, 240, floors=30, caps=100, literal=True).tolist() == [100, 60, 36, 30]


def test_extrapolation_keeps_shares_upwards_and_floors_downwards() -> None:
    given = np.array([120, 60, 36, 24])
    for factor in (2, 4, 16):
        assert extrapolate(given, 60 * factor, 9).tolist() == (given * factor).tolist()
        assert extrapolate(given, 60 * factor, 9, literal=True).tolist() == (given * factor).tolist()
    smaller = extrapolate(given, 15, 9)
    assert smaller.tolist() == [28, 14, 9, 9]  # 42 in shares of 120 : 60
    assert smaller.sum() == 60
    assert extrapolate(given, 15, 9, literal=True).tolist() == [30, 15, 9, 9]
    assert extrapolate(np.array([[4, 8], [2, 2]]), 8, 1).tolist() == [[8, 16], [4, 4]]


@pytest.mark.parametrize(
    ("budgets", "total", "floors", "message"),
    [
        ([0, 0], 10, 0, "not all 0, got a sum of 0"),
        ([-1, 5], 10, 0, "must be 0 or more"),
        ([4, 5], 10, 6, "total 10 cannot be met"),
    ],
)
def test_bad_input(budgets: list[int], total: int, floors: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        complete(np.array(budgets), total, floors)
