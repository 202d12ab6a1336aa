from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.report.page.scale import Scale, every, fitted, label, ticks, ticks_at
from tests.examples import at_most


def test_values_have_places() -> None:
    assert [Scale(0, 10, 100, 200)(value) for value in (0, 2.5, 10)] == [100, 125, 200]
    assert [round(Scale(1, 100, 0, 10, log=True)(value), 9) for value in (1, 10, 100)] == [0, 5, 10]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (-0.7, 0.3, [-0.6, -0.4, -0.2, 0, 0.2]),
        (61.3, 64.9, [62, 63, 64]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(Scale(low, high, 0, 1)) == pytest.approx(found)


def test_ticks_of_logarithms() -> None:
    assert ticks(Scale(0.9, 1200, 0, 1, log=True)) == [1, 10, 100, 1000]
    assert ticks(Scale(8, 70, 0, 1, log=True)) == [10, 20, 50]


def test_few_values_get_a_tick_each_unless_their_labels_meet() -> None:
    scale = fitted([32, 64, 128], 0, 300, log=True)
    assert ticks_at([32, 64, 128, 64], scale, 30) == [32, 64, 128]
    assert ticks_at([32, 33, 128], scale, 30) == ticks(scale)


@at_most(60)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.booleans())
def test_all_values_are_within_a_fitted_scale(values: list[float], log: bool) -> None:
    scale = fitted([*values, math.nan], 0, 100, log=log)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in values)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in ticks(scale))
    assert 1 <= len(ticks(scale)) <= 12


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.25, "0.25"), (-3.0, "−3"), (12_500.0, "12.5k"), (1e-5, "1e−05")]
)
def test_labels(value: float, text: str) -> None:
    assert label(value) == text


def test_every_so_many_names_are_written() -> None:
    assert list(every(6, 10, 9)) == [0, 1, 2, 3, 4, 5]
    assert list(every(32, 5, 18)) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert list(every(3, 0.001, 50)) == [0]
