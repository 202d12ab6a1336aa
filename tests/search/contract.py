"""What every optimiser must do; a test class subclasses `OptimiserContract` and names it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from kvsearch.core.arrays import Vector
from kvsearch.search.optimisers import CMA, GoldenSection, MixedSearch, Optimiser, Problem

OPTIMISERS: dict[str, type[Optimiser]] = {"cma": CMA, "golden": GoldenSection, "mixed": MixedSearch}


def create_optimiser(name: str, start: Any, lower: Any, upper: Any, seed: int, **options: Any) -> Optimiser:
    """An optimiser by its name, in a box."""
    box = (np.array(given, dtype=np.float64) for given in (start, lower, upper))
    return OPTIMISERS[name](Problem(*box, seed, **options))


Told = list[tuple[list[Vector], list[float]]]


def quadratic(point: Vector) -> float:
    """Convex, with its minimum inside the bounds of the contract, away from the start."""
    weights = 1 + np.arange(len(point)) % 3
    return float((weights * (point - 1.4) ** 2).sum())


class OptimiserContract:
    """Subclasses set `name`, and `dimension` where they need another; `chance` says whether the seed counts."""

    name: ClassVar[str]
    dimension: ClassVar[int] = 3
    chance: ClassVar[bool] = True
    generations: ClassVar[int] = 40

    def build(self, seed: int = 5, **options: float) -> Optimiser:
        shape = self.dimension
        return create_optimiser(self.name, np.ones(shape), np.full(shape, 0.2), np.full(shape, 2.5), seed, **options)

    def moved(self, points: list[Vector]) -> list[Vector]:
        """What a search space may tell instead of the points asked for: here on a lattice."""
        return [np.clip(np.round(point * 8) / 8, 0.2, 2.5) for point in points]

    def run(self, optimiser: Optimiser, generations: int | None = None) -> tuple[list[list[Vector]], Told]:
        asked, told = [], []
        for _ in range(generations or self.generations):
            if optimiser.finished is not None:
                break
            asked.append(optimiser.ask())
            points = self.moved(asked[-1])
            told.append((points, [quadratic(point) for point in points]))
            optimiser.tell(*told[-1])
        return asked, told

    def test_points_are_float64_vectors_within_the_bounds(self) -> None:
        optimiser = self.build(sigma=3.0)
        asked, _ = self.run(optimiser)
        for point in (*(point for generation in asked for point in generation), optimiser.best_guess):
            assert point.shape == (self.dimension,)
            assert point.dtype == np.float64
            assert (point >= 0.2).all()
            assert (point <= 2.5).all()

    def test_one_seed_one_search(self) -> None:
        asked, _ = self.run(self.build())
        again, _ = self.run(self.build())
        other, _ = self.run(self.build(seed=6))
        np.testing.assert_equal(again, asked)
        assert self.chance == (other[0][0].tolist() != asked[0][0].tolist())

    @pytest.mark.parametrize("cut", [1, 4, 9])
    def test_it_is_replayed_from_what_it_was_told(self, cut: int) -> None:
        injected = [np.full(self.dimension, 0.7), np.full(self.dimension, 1.2)]
        first = self.build()
        first.inject(injected)
        asked, told = self.run(first)
        assert len(told) > cut
        fresh = self.build()
        fresh.inject(injected)
        for generation in told[:cut]:
            fresh.ask()
            fresh.tell(*generation)
        for points, generation in zip(asked[cut:], told[cut:], strict=True):
            np.testing.assert_equal(fresh.ask(), points)
            fresh.tell(*generation)
        np.testing.assert_equal(fresh.best_guess, first.best_guess)
        assert fresh.finished == first.finished

    def test_it_improves_on_the_start(self) -> None:
        optimiser = self.build()
        np.testing.assert_equal(optimiser.best_guess, np.ones(self.dimension))
        self.run(optimiser)
        assert quadratic(optimiser.best_guess) < quadratic(np.ones(self.dimension)) / 2

    def test_injected_points_come_first_and_once(self) -> None:
        injected = [np.full(self.dimension, 1.4), np.full(self.dimension, 2.5)]
        optimiser, plain = self.build(), self.build()
        optimiser.inject(injected)
        first = optimiser.ask()
        np.testing.assert_equal(first, [*injected, *plain.ask()])
        optimiser.tell(first, [quadratic(point) for point in first])
        assert not any(np.array_equal(point, injected[1]) for point in optimiser.ask())

    def test_equal_values_neither_stop_nor_break_it(self) -> None:
        optimiser = self.build(tolerance=1e-6)
        for _ in range(12):
            points = optimiser.ask()
            optimiser.tell(points, [1.0] * len(points))
            assert optimiser.finished is None

    def test_a_finished_search_says_why(self) -> None:
        optimiser = self.build(tolerance=0.02)
        for _ in range(300):
            if optimiser.finished is not None:
                break
            points = optimiser.ask()
            optimiser.tell(points, [quadratic(point) for point in points])
        assert "tolerance of 0.02" in optimiser.finished
        assert np.abs(optimiser.best_guess - 1.4).max() < 0.05
