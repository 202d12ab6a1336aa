from __future__ import annotations

import numpy as np
import pytest

from kvsearch.core.arrays import Vector
from kvsearch.plan.rounding import water_level
from kvsearch.search.optimisers import Optimiser
from tests.search.contract import OptimiserContract, create_optimiser, quadratic


class TestCMA(OptimiserContract):
    name = "cma"
    dimension = 4
    generations = 30


def build(dimension: int, tolerance: float = 1e-3, **options: int) -> Optimiser:
    shape = dimension
    return create_optimiser(
        "cma", np.ones(shape), np.full(shape, 0.2), np.full(shape, 3.0), 0, tolerance=tolerance, **options
    )


def test_many_injected_points_do_not_crowd_out_the_population(capsys: pytest.CaptureFixture[str]) -> None:
    optimiser = build(3)
    optimiser.inject([np.full(3, 0.2 + 0.1 * step) for step in range(20)])
    points = optimiser.ask()
    assert len(points) == 20 + 7
    optimiser.tell(points, [quadratic(point) for point in points])
    assert len(optimiser.ask()) == 7
    assert np.linalg.norm(optimiser.best_guess - 1.4) < np.linalg.norm(np.ones(3) - 1.4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("dimension", [2, 8])
def test_told_points_on_a_plane_do_not_lead_it_astray(dimension: int) -> None:
    """Exponential losses of budgets with a total: it converges, and far from uniform budgets."""
    rng = np.random.default_rng(dimension)
    weights, scales = np.exp(rng.normal(0, 1, dimension)), np.exp(rng.normal(-0.3, 0.5, dimension))

    def loss(point: Vector) -> float:
        return float((weights * np.exp(-point / scales)).sum())

    def on_the_plane(point: Vector) -> Vector:
        return np.clip(water_level(point * 100, dimension * 100, 20, 300) / 100, 0.2, 3.0)

    optimiser = build(dimension, tolerance=0.005)
    generations = 0
    while optimiser.finished is None:
        points = [on_the_plane(point) for point in optimiser.ask()]
        optimiser.tell(points, [loss(point) for point in points])
        generations += 1
        assert generations < 150
    found = on_the_plane(optimiser.best_guess)
    inside = (found > 0.25) & (found < 2.95)
    slopes = weights[inside] / scales[inside] * np.exp(-found[inside] / scales[inside])  # equal at the optimum
    assert loss(found) < loss(np.ones(dimension))
    assert slopes.max() / slopes.min() < 1.05
