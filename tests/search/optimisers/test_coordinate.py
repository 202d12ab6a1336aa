from __future__ import annotations

import numpy as np

from kvsearch.core.arrays import Vector
from kvsearch.search.optimisers import Optimiser
from tests.search.contract import OptimiserContract, create_optimiser


class TestCoordinate(OptimiserContract):
    name = "coordinate"
    chance = False

    def moved(self, points: list[Vector]) -> list[Vector]:
        """A lattice as wide as the steps would hold them all back."""
        return [np.round(point * 1024) / 1024 for point in points]


def build(dimension: int = 2, sigma: float = 0.5, tolerance: float = 0.1) -> Optimiser:
    shape = dimension
    return create_optimiser(
        "coordinate", np.ones(shape), np.full(shape, 0.25), np.full(shape, 2.0), 0, sigma=sigma, tolerance=tolerance
    )


def tell(optimiser: Optimiser, values: list[float]) -> list[list[float]]:
    points = optimiser.ask()
    optimiser.tell(points, values)
    return [point.tolist() for point in points]


def test_a_search_step_by_step() -> None:
    optimiser = build()
    assert tell(optimiser, [5.0, 6.0, 4.0]) == [[1.0, 1.0], [1.5, 1.0], [0.5, 1.0]]  # down is better
    assert tell(optimiser, [3.0, 9.0]) == [[0.5, 1.5], [0.5, 0.5]]  # up is better
    assert tell(optimiser, [3.0, 9.0]) == [[1.0, 1.5], [0.25, 1.5]]  # cut short by the bound; as good is not better
    assert tell(optimiser, [9.0, 9.0]) == [[0.5, 2.0], [0.5, 1.0]]  # a round without progress
    assert tell(optimiser, [9.0, 2.0]) == [[0.75, 1.5], [0.25, 1.5]]
    assert tell(optimiser, [9.0, 9.0]) == [[0.25, 1.75], [0.25, 1.25]]
    assert tell(optimiser, [9.0]) == [[0.5, 1.5]]  # there is nothing below the bound
    assert tell(optimiser, [9.0, 9.0]) == [[0.25, 1.75], [0.25, 1.25]]
    assert tell(optimiser, [9.0]) == [[0.375, 1.5]]
    assert optimiser.finished is None
    tell(optimiser, [9.0, 9.0])
    assert optimiser.finished == "steps of 0.0625 are below the tolerance of 0.1"
    assert optimiser.best_guess.tolist() == [0.25, 1.5]


def test_a_better_injected_point_becomes_the_centre() -> None:
    optimiser = build()
    optimiser.inject([np.array([1.75, 0.5]), np.array([0.5, 0.5])])
    points = tell(optimiser, [1.0, 7.0, 5.0, 6.0, 6.0])
    assert points == [[1.75, 0.5], [0.5, 0.5], [1.0, 1.0], [1.5, 1.0], [0.5, 1.0]]
    assert tell(optimiser, [9.0, 9.0]) == [[1.75, 1.0], [1.75, 0.25]]


def test_fixed_axes_are_skipped() -> None:
    optimiser = create_optimiser("coordinate", [1.0, 1.0, 1.0], [1.0, 0.5, 1.0], [1.0, 2.0, 1.0], 0)
    assert tell(optimiser, [1.0, 2.0, 2.0]) == [[1.0, 1.0, 1.0], [1.0, 1.3, 1.0], [1.0, 0.7, 1.0]]
    assert tell(optimiser, [2.0, 2.0]) == [[1.0, 1.15, 1.0], [1.0, 0.85, 1.0]]
