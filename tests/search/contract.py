"""What every optimiser must do; a test class subclasses `OptimiserContract` and names it."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest

from kvsearch.arrays import Vector
from kvsearch.errors import UsageError
from kvsearch.search.optimisers.base import Optimiser, create_optimiser

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

    def test_it_has_the_name_it_is_registered_under(self) -> None:
        assert self.build().name == self.name

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

    def test_what_the_caller_does_with_points_changes_nothing(self) -> None:
        asked, told = self.run(self.build())
        optimiser = self.build()
        for points, generation in zip(asked, told, strict=True):
            given = optimiser.ask()
            np.testing.assert_equal(given, points)
            for point in given:
                point[:] = 0.0
            mine = [point.copy() for point in generation[0]]
            optimiser.tell(mine, generation[1])
            np.testing.assert_equal(mine, generation[0])
            optimiser.best_guess[:] = 0.0

    def test_no_global_random_state_is_read_or_changed(self) -> None:
        asked, _ = self.run(self.build())
        np.random.seed(123)  # noqa: NPY002
        random.seed(123)
        before = str(np.random.get_state()), random.getstate()  # noqa: NPY002
        again, _ = self.run(self.build())
        np.testing.assert_equal(again, asked)
        assert (str(np.random.get_state()), random.getstate()) == before  # noqa: NPY002

    def test_it_improves_on_the_start(self) -> None:
        optimiser = self.build()
        np.testing.assert_equal(optimiser.best_guess, np.ones(self.dimension))
        self.run(optimiser)
        assert quadratic(optimiser.best_guess) < quadratic(np.ones(self.dimension)) / 2

    def test_injected_points_come_first_and_once(self) -> None:
        injected = [np.full(self.dimension, 1.4), np.full(self.dimension, 2.5)]
        optimiser, plain = self.build(), self.build()
        optimiser.inject(injected[:1])
        optimiser.inject(injected[1:])
        first = optimiser.ask()
        np.testing.assert_equal(first, [*injected, *plain.ask()])
        optimiser.tell(first, [quadratic(point) for point in first])
        assert not any(np.array_equal(point, injected[1]) for point in optimiser.ask())

    def test_points_cannot_be_injected_later_or_outside_the_bounds(self) -> None:
        optimiser = self.build()
        with pytest.raises(UsageError, match="outside the bounds"):
            optimiser.inject([np.full(self.dimension, 2.6)])
        optimiser.ask()
        with pytest.raises(UsageError, match="before the first generation only"):
            optimiser.inject([np.ones(self.dimension)])

    def test_asking_twice_is_refused(self) -> None:
        optimiser = self.build()
        points = optimiser.ask()
        with pytest.raises(UsageError, match=f"asked twice.* {len(points)} points"):
            optimiser.ask()
        optimiser.tell(points, [1.0] * len(points))
        with pytest.raises(UsageError, match="told before it asked"):
            optimiser.tell(points, [1.0] * len(points))

    def test_wrong_counts_are_refused_and_can_be_mended(self) -> None:
        optimiser = self.build()
        points = optimiser.ask()
        values = [quadratic(point) for point in points]
        for wrong in ((points[1:], values), (points, values[1:]), ([], []), ([*points, points[0]], [*values, 1.0])):
            with pytest.raises(UsageError, match=f"asked for {len(points)} points, was told {len(wrong[0])} points"):
                optimiser.tell(*wrong)
        optimiser.tell(points, values)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_values_that_are_not_finite_are_refused(self, value: float) -> None:
        optimiser = self.build()
        points = optimiser.ask()
        with pytest.raises(UsageError, match=r"was told (nan|-?inf): give .* the worst finite value"):
            optimiser.tell(points, [1.0] * (len(points) - 1) + [value])
        assert optimiser.best_guess.tolist() == [1.0] * self.dimension

    def test_unusable_points_are_refused(self) -> None:
        optimiser = self.build()
        points = optimiser.ask()
        for wrong, message in (
            (np.full(self.dimension, 2.51), "outside the bounds"),
            (np.full(self.dimension, np.nan), "outside the bounds"),
            (np.ones(self.dimension + 1), rf"shape \[{self.dimension}\], got \[{self.dimension + 1}\]"),
        ):
            with pytest.raises(UsageError, match=message):
                optimiser.tell([wrong, *points[1:]], [1.0] * len(points))

    def test_equal_values_neither_stop_nor_break_it(self) -> None:
        optimiser = self.build(tolerance=1e-6)
        for _ in range(12):
            points = optimiser.ask()
            optimiser.tell(points, [1.0] * len(points))
            assert optimiser.finished is None

    def test_a_finished_search_says_why_and_asks_no_more(self) -> None:
        optimiser = self.build(tolerance=0.02)
        for _ in range(300):
            if optimiser.finished is not None:
                break
            points = optimiser.ask()
            optimiser.tell(points, [quadratic(point) for point in points])
        if self.name == "random":
            assert optimiser.finished is None
            return
        assert optimiser.finished is not None
        assert "tolerance of 0.02" in optimiser.finished
        with pytest.raises(UsageError, match=r"nothing left to ask: .* tolerance of 0\.02"):
            optimiser.ask()
        assert np.abs(optimiser.best_guess - 1.4).max() < 0.05
