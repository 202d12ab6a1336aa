from __future__ import annotations

import numpy as np

from tests.search.contract import OptimiserContract, create_optimiser


class TestRandom(OptimiserContract):
    name = "random"


def test_the_start_is_the_mean_where_the_bounds_permit() -> None:
    start, lower, upper = [1.0, 1.0, 0.3], [0.3, 0.0, 0.3], [8.0, 1.9, 8.0]
    optimiser = create_optimiser("random", start, lower, upper, 0, population=4000)
    points = np.array(optimiser.ask())
    np.testing.assert_allclose(points.min(axis=0), [0.3, 0.1, 0.3], atol=0.01)
    np.testing.assert_allclose(points.max(axis=0), [1.7, 1.9, 0.6], atol=0.01)  # sigma, where the start is on a bound
    np.testing.assert_allclose(points.mean(axis=0), [1.0, 1.0, 0.45], atol=0.03)


def test_a_fixed_coordinate_stays() -> None:
    optimiser = create_optimiser("random", [1.0, 1.0], [1.0, 0.0], [1.0, 2.0], 0)
    assert {point[0] for point in optimiser.ask()} == {1.0}
