from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsearch.errors import UsageError
from kvsearch.search.optimisers.base import create_optimiser, default_population, optimiser_names


def test_the_registered_names() -> None:
    assert optimiser_names() == ["cma", "coordinate", "golden", "mixed", "random"]


@pytest.mark.parametrize(("dimension", "points"), [(1, 4), (2, 6), (4, 8), (8, 10), (16, 12), (32, 14)])
def test_the_population_of_the_paper(dimension: int, points: int) -> None:
    assert default_population(dimension) == points
    optimiser = create_optimiser("random", np.ones(dimension), np.zeros(dimension), np.full(dimension, 2.0), 0)
    assert len(optimiser.ask()) == points


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "cme"}, "unknown optimiser 'cme'; did you mean 'cma'\\?"),
        ({"lower": [0.5]}, r"vectors of one length, got shapes \[2\], \[1\], \[2\]"),
        ({"start": [], "lower": [], "upper": []}, "vectors of one length"),
        ({"start": [[1.0, 1.0]]}, r"got shapes \[1, 2\]"),
        ({"upper": [2.0, np.inf]}, "start and bounds must be finite"),
        ({"start": [1.0, 2.5]}, r"start 2\.5 is outside its bounds \[0\.5, 2\] at index 1"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"population": 0}, "a population of 0 has no points"),
        ({"name": "coordinate", "population": 4}, "coordinate has no population"),
        ({"sigma": 0.0}, "sigma must be finite and above 0, got 0"),
        ({"sigma": float("nan")}, "sigma must be finite"),
        ({"tolerance": float("inf")}, "tolerance must be finite and above 0"),
    ],
)
def test_unusable_requests_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    given = {"name": "random", "start": [1.0, 1.0], "lower": [0.5, 0.5], "upper": [2.0, 2.0], "seed": 0, **changes}
    with pytest.raises(UsageError, match=message) as caught:
        create_optimiser(**given)
    assert "\n" not in str(caught.value)


def test_points_that_miss_a_bound_by_rounding_are_taken() -> None:
    optimiser = create_optimiser("random", [1.0], [0.5], [2.0], 0, population=1)
    optimiser.ask()
    optimiser.tell([np.array([2.0 + 1e-12])], [1.0])
    assert optimiser.best_guess.tolist() == [2.0]


def test_the_best_of_equal_points_is_the_nearest_to_the_start_then_the_first() -> None:
    optimiser = create_optimiser("random", [1.0], [0.0], [2.0], 0, population=4)
    optimiser.ask()
    optimiser.tell([np.array([x]) for x in (0.2, 1.5, 0.5, 1.1)], [3.0, 2.0, 2.0, 2.5])
    assert optimiser.best_guess.tolist() == [1.5]
    optimiser.ask()
    optimiser.tell([np.array([x]) for x in (0.9, 1.25, 0.75, 0.1)], [2.5, 2.0, 2.0, 2.0])
    assert optimiser.best_guess.tolist() == [1.25]
