"""Golden sections of one number; choices and numbers together."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.arrays import Vector
from kvsearch.search.optimisers import Optimiser, default_population
from tests.examples import at_most
from tests.search.contract import OptimiserContract, create_optimiser


def test_a_failed_inner_point_does_not_stand_for_what_bounds_have_to_beat() -> None:
    """The other inner point is better than both bounds, so the bracket closes around it."""
    optimiser = create_optimiser("golden", [1.0], [0.0], [10.0], 0)
    optimiser.tell(optimiser.ask(), [9.0, 1.0], measured=[1.0])
    np.testing.assert_equal(optimiser.ask(), [[0.0], [10.0]])
    optimiser.tell([np.array([0.0]), np.array([10.0])], [2.0, 3.0])
    (point,) = optimiser.ask()
    assert point[0] > 10 * (math.sqrt(5) - 1) / 2


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


@pytest.mark.parametrize("minimum", [0.26, 1.0, 7.9])
def test_whole_budgets(minimum: float) -> None:
    budget = 128
    best = round(minimum * budget)
    optimiser = create_optimiser("golden", [1.0], [0.25], [8.0], 0, tolerance=0.5 / budget)
    counts = minimise(lambda x: abs(round(x * budget) - best) ** 1.5, optimiser)
    assert counts == [2] + [1] * (len(counts) - 1)
    assert len(counts) == math.ceil(math.log(7.75 * 2 * budget) / math.log((math.sqrt(5) + 1) / 2))
    assert round(float(optimiser.best_guess[0]) * budget) == best


@given(st.floats(0.1, 0.9), st.integers(1, 40))
@at_most(60)
def test_a_plateau_at_the_bottom_is_reached(centre: float, width: int) -> None:
    low, high = centre - width / 100, centre + width / 100

    def function(x: float) -> float:
        return max(low - x, x - high, 0.0)

    optimiser = create_optimiser("golden", [0.5], [0.0], [1.0], 0, tolerance=1e-3)
    minimise(function, optimiser)
    assert function(float(optimiser.best_guess[0])) < 1e-3


@pytest.mark.parametrize(("best", "bound"), [(lambda x: -(x > 9), 10.0), (lambda x: -(x < 0.5), 0.0)])
def test_what_the_first_points_do_not_tell_apart_the_bounds_may(best: Callable[[float], float], bound: float) -> None:
    optimiser = create_optimiser("golden", [1.0], [0.0], [10.0], 0, tolerance=0.01)
    counts = minimise(best, optimiser)
    assert counts[:2] == [2, 2]
    assert best(float(optimiser.best_guess[0])) == -1
    assert abs(float(optimiser.best_guess[0]) - bound) < 1


CATEGORIES = np.array([3, 0, 4, 0])


class TestMixed(OptimiserContract):
    name = "mixed"

    def moved(self, points: list[Vector]) -> list[Vector]:
        """A lattice as wide as the steps would hold them all back."""
        return [np.round(point * 1024) / 1024 for point in points]


def build(seed: int = 0, **options: float) -> Optimiser:
    start, upper = [0.0, 1.0, 0.0, 1.0], [2.0, 2.0, 3.0, 2.0]
    return create_optimiser("mixed", start, [0.0] * 4, upper, seed, categories=CATEGORIES, **options)


def loss(point: Vector) -> float:
    """Best at choices 2 and 1 with numbers 1.5 and 0.5; which number is best depends on the choice."""
    first = 1.5 if point[0] == 2 else 0.2
    return float((point[0] != 2) + (point[2] != 1) + (point[1] - first) ** 2 + (point[3] - 0.5) ** 2)


def run(optimiser: Optimiser, generations: int = 200) -> list[list[Vector]]:
    asked = []
    for _ in range(generations):
        if optimiser.finished is not None:
            break
        asked.append(optimiser.ask())
        optimiser.tell(asked[-1], [loss(point) for point in asked[-1]])
    return asked


def test_it_finds_choices_and_numbers() -> None:
    optimiser = build(tolerance=0.01)
    asked = run(optimiser)
    assert optimiser.best_guess[[0, 2]].tolist() == [2, 1]
    assert optimiser.best_guess[[1, 3]] == pytest.approx([1.5, 0.5], abs=0.05)
    assert "no choice is better" in optimiser.finished
    assert all(point[[0, 2]].tolist() == np.rint(point[[0, 2]]).tolist() for points in asked for point in points)


def test_generations_take_turns_and_change_one_choice_at_a_time() -> None:
    optimiser = build()
    first = optimiser.ask()
    np.testing.assert_equal(first[-1], optimiser.start)
    changed = [np.flatnonzero(point != optimiser.start).tolist() for point in first[:-1]]
    assert changed == [[0], [0], [2], [2], [2]]
    optimiser.tell(first, [1.0] * len(first))
    numbers = optimiser.ask()
    assert all(point[[0, 2]].tolist() == [0, 0] for point in numbers)
    assert len(numbers) == 8


def test_the_population_of_the_paper() -> None:
    assert [default_population(dimension) for dimension in (1, 2, 4, 8, 16, 32)] == [4, 6, 8, 10, 12, 14]
    assert len(create_optimiser("cma", np.ones(4), np.zeros(4), np.full(4, 2.0), 0).ask()) == 8


def test_the_best_of_equal_points_is_the_nearest_to_the_start_then_the_first() -> None:
    optimiser = create_optimiser("mixed", [1.0], [0.0], [2.0], 0, population=4)
    optimiser.ask()
    optimiser.tell([np.array([x]) for x in (0.2, 1.5, 0.5, 1.1)], [3.0, 2.0, 2.0, 2.5])
    assert optimiser.best_guess.tolist() == [1.5]
    optimiser.ask()
    optimiser.tell([np.array([x]) for x in (0.9, 1.25, 0.75, 0.1)], [2.5, 2.0, 2.0, 2.0])
    assert optimiser.best_guess.tolist() == [1.25]
