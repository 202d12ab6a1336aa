from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.search.optimisers import Optimiser
from tests.examples import at_most
from tests.search.contract import OptimiserContract, create_optimiser


class TestGolden(OptimiserContract):
    name = "golden"
    dimension = 1
    chance = False


def minimise(function: Callable[[float], float], optimiser: Optimiser) -> list[int]:
    """Points per generation until it is finished."""
    counts = []
    while optimiser.finished is None:
        points = optimiser.ask()
        counts.append(len(points))
        optimiser.tell(points, [function(float(point[0])) for point in points])
    return counts


def test_the_first_points() -> None:
    optimiser = create_optimiser("golden", [1.0], [0.0], [10.0], 0)
    share = (math.sqrt(5) - 1) / 2
    points = optimiser.ask()
    np.testing.assert_allclose(np.ravel(points), [10 * (1 - share), 10 * share])
    optimiser.tell(points, [1.0, 2.0])
    np.testing.assert_allclose(np.ravel(optimiser.ask()), [10 * share * (1 - share)])


@pytest.mark.parametrize("minimum", [0.26, 0.9, 1.0, 3.3, 7.9])
def test_whole_budgets(minimum: float) -> None:
    budget = 128
    best = round(minimum * budget)
    optimiser = create_optimiser("golden", [1.0], [0.25], [8.0], 0, tolerance=0.5 / budget)
    counts = minimise(lambda x: abs(round(x * budget) - best) ** 1.5, optimiser)
    assert counts == [2] + [1] * (len(counts) - 1)
    assert len(counts) == math.ceil(math.log(7.75 * 2 * budget) / math.log((math.sqrt(5) + 1) / 2))
    assert round(float(optimiser.best_guess[0]) * budget) == best


@given(st.floats(0.0, 10.0))
@at_most(60)
def test_a_flat_function_ends_at_the_start(start: float) -> None:
    optimiser = create_optimiser("golden", [start], [0.0], [10.0], 0, tolerance=0.01)
    minimise(lambda _: 7.0, optimiser)
    assert abs(float(optimiser.best_guess[0]) - start) < 0.01


@given(st.floats(0.1, 0.9), st.integers(1, 40))
@at_most(60)
def test_a_plateau_at_the_bottom_is_reached(centre: float, width: int) -> None:
    low, high = centre - width / 100, centre + width / 100

    def function(x: float) -> float:
        return max(low - x, x - high, 0.0)

    optimiser = create_optimiser("golden", [0.5], [0.0], [1.0], 0, tolerance=1e-3)
    minimise(function, optimiser)
    assert function(float(optimiser.best_guess[0])) < 1e-3


def test_injected_points_do_not_move_the_bracket() -> None:
    plain, injected = (create_optimiser("golden", [1.0], [0.0], [4.0], 0, tolerance=0.1) for _ in range(2))
    injected.inject([np.array([3.0])])
    points = injected.ask()
    injected.tell(points, [-1.0, *(abs(float(point[0]) - 1) for point in points[1:])])
    assert minimise(lambda x: abs(x - 1), injected) == minimise(lambda x: abs(x - 1), plain)[1:]
    assert injected.best_guess.tolist() == [3.0]
