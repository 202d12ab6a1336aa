from __future__ import annotations

import numpy as np
import pytest

from kvsearch.search.optimisers import default_population
from tests.search.contract import create_optimiser


@pytest.mark.parametrize(("dimension", "points"), [(1, 4), (2, 6), (4, 8), (8, 10), (16, 12), (32, 14)])
def test_the_population_of_the_paper(dimension: int, points: int) -> None:
    assert default_population(dimension) == points
    if dimension > 1:
        optimiser = create_optimiser("cma", np.ones(dimension), np.zeros(dimension), np.full(dimension, 2.0), 0)
        assert len(optimiser.ask()) == points


def test_the_best_of_equal_points_is_the_nearest_to_the_start_then_the_first() -> None:
    optimiser = create_optimiser("mixed", [1.0], [0.0], [2.0], 0, population=4)
    optimiser.ask()
    optimiser.tell([np.array([x]) for x in (0.2, 1.5, 0.5, 1.1)], [3.0, 2.0, 2.0, 2.5])
    assert optimiser.best_guess.tolist() == [1.5]
    optimiser.ask()
    optimiser.tell([np.array([x]) for x in (0.9, 1.25, 0.75, 0.1)], [2.5, 2.0, 2.0, 2.0])
    assert optimiser.best_guess.tolist() == [1.25]
