"""Exact rounding: the worked examples, then the defining greedy rules as a brute-force oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.plan import ProfileMetadata, Size
from kvsearch.plan.rounding import largest_remainder, water_fill
from kvsearch.plan.size import Pool, round_half_up

from .builders import metadata_dict


def greedy_oracle(ideal: list[float], total: int, lower: list[int], upper: list[int]) -> list[int]:
    """One unit at a time, as the rule is stated."""
    kept = [min(max(int(np.floor(x + 1e-9)), lo), hi) for x, lo, hi in zip(ideal, lower, upper, strict=True)]
    while sum(kept) != total:
        step = 1 if sum(kept) < total else -1
        open_to = [i for i, k in enumerate(kept) if (k < upper[i] if step > 0 else k > lower[i])]
        winner = max(open_to, key=lambda i: (step * round(ideal[i] - kept[i], 9), -i))
        kept[winner] += step
    return kept


@pytest.mark.parametrize(
    ("ideal", "total", "lower", "expected"),
    [
        ([6.4, 8.8, 11.2, 13.6], 40, 4, [6, 9, 11, 14]),
        ([19.5, 38.75, 0.25, 21.5], 80, 1, [19, 39, 1, 21]),
        ([12.0, 28 / 3, 20 / 3, 4.0], 32, 0, [12, 9, 7, 4]),
        ([0.5, 0.5, 0.5, 0.5], 2, 0, [1, 1, 0, 0]),
        ([1.4, 10.4, 3.4], 15, 0, [2, 10, 3]),
        ([0.0, 0.0, 0.0], 7, 0, [3, 2, 2]),
    ],
)
def test_worked_examples(ideal: list[float], total: int, lower: int, expected: list[int]) -> None:
    assert largest_remainder(ideal, total, lower).tolist() == expected


@st.composite
def bounded(draw: st.DrawFn) -> tuple[list[float], int, list[int], list[int]]:
    size = draw(st.integers(1, 7))
    tenths = st.integers(0, 120).map(lambda n: n / 10)
    ideal = draw(st.lists(tenths, min_size=size, max_size=size))
    lower = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    upper = [lo + draw(st.integers(0, 9)) for lo in lower]
    return ideal, draw(st.integers(sum(lower), sum(upper))), lower, upper


@given(bounded())
def test_equals_the_unit_by_unit_rule(case: tuple[list[float], int, list[int], list[int]]) -> None:
    assert largest_remainder(*case).tolist() == greedy_oracle(*case)


@given(bounded())
def test_water_fill_is_exact_and_close_to_its_ideal(case: tuple[list[float], int, list[int], list[int]]) -> None:
    weights, total, lower, upper = case
    budgets = water_fill(weights, total, lower, upper)
    assert budgets.sum() == total
    assert (budgets >= lower).all()
    assert (budgets <= upper).all()
    # One multiplier fits all: each budget is within one unit of clamp(lam * w), so their intervals of lam meet.
    w = np.asarray(weights)
    free = w > 0
    below = free & (budgets < upper)
    above = free & (budgets > lower)
    if below.any() and above.any():
        assert ((budgets - 1)[above] / w[above]).max() <= ((budgets + 1)[below] / w[below]).min() + 1e-9


def test_water_fill_examples() -> None:
    assert water_fill([1, 2, 3, 4], 40, upper=12).tolist() == [5, 11, 12, 12]
    assert water_fill([1, 1, 8], 20, lower=4).tolist() == [4, 4, 12]
    assert water_fill([0.0, 0.0, 0.0], 10, lower=[0, 6, 0]).tolist() == [2, 6, 2]
    assert water_fill([5.0, 0.0, 0.0], 10, upper=4).tolist() == [4, 3, 3]
    assert water_fill([1e-290, 1e300, 1e300], 6, upper=2).tolist() == [2, 2, 2]


@pytest.mark.parametrize("round_to", [largest_remainder, water_fill])
@pytest.mark.parametrize(
    ("values", "total", "lower", "upper", "message"),
    [
        ([1.0, 2.0], 9, 0, 4, "total 9 .*at least 0, at most 8"),
        ([1.0, 2.0], 3, 2, None, "total 3 .* 4"),
        ([1.0, float("nan")], 3, 0, None, "nan"),
        ([1.0, -0.5], 3, 0, None, "-0.5"),
        ([1.0, 2.0], 3, 5, 4, "lower bound 5 .* upper bound 4"),
        ([], 1, 0, None, "total 1"),
    ],
)
def test_refusals_name_the_numbers(
    round_to: Callable[..., Any], values: list[float], total: int, lower: Any, upper: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        round_to(values, total, lower, upper)
    assert "\n" not in str(caught.value)


def test_nothing_to_share() -> None:
    assert largest_remainder(np.zeros((2, 0)), 0).shape == (2, 0)
    assert water_fill([0.0], 0).tolist() == [0]
    assert water_fill(3.0, 5).tolist() == 5


@pytest.mark.parametrize(("value", "expected"), [(0.5, 1), (1.5, 2), (2.5, 3), (2.4999, 2), (0.7 * 5, 4), (1.1 * 5, 6)])
def test_round_half_up(value: float, expected: int) -> None:
    assert round_half_up(value) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "give either a ratio .* or entries"),
        ({"ratio": 0.5, "budget": 10}, "give either a ratio .* or entries"),
        ({"ratio": 0.0}, r"ratio 0.0 is outside \(0, 1\)"),
        ({"ratio": 1.0}, r"ratio 1.0 is outside \(0, 1\)"),
        ({"ratio": float("nan")}, "ratio nan is outside"),
        ({"ratio": 0.5, "length": 0}, "length 0 must be 1 token or more"),
        ({"budget": 0}, "a budget of 0 keeps nothing: give at least 1 entry per kv head"),
    ],
)
def test_sizes_that_make_no_sense(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Size(**given)


@pytest.mark.parametrize(
    ("size", "length", "total", "mean"),
    [
        (Size(budget=12), 100, 96, 12),
        (Size(budget=12), 10, 96, 12),  # in full where the prompt is shorter
        (Size(ratio=0.75), 100, 200, 25),
        (Size(ratio=0.75), 101, 202, 25.25),
        (Size(ratio=0.5, length=7), 101, 404, 50.5),  # of the prompt at hand
        (Size(ratio=0.999), 100, 1, 0.1),
    ],
)
def test_totals(size: Size, length: int, total: int, mean: float) -> None:
    assert size.total(length, 8) == total
    assert size.held(length, 8) == max(total, 8)
    assert size.mean(length) == pytest.approx(mean)


def test_what_the_layers_of_a_profile_share() -> None:
    metadata = ProfileMetadata.model_validate(metadata_dict())
    heads = metadata.shape[0] * metadata.shape[1]
    pool = Size(ratio=0.5).pool(metadata)
    assert pool == Pool(metadata.shape, heads * metadata.length // 2, metadata.length)
    assert pool.mean == metadata.length / 2
    assert Size(ratio=0.5, length=30).pool(metadata) == Pool(metadata.shape, heads * 15, 30)
