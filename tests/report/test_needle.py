"""Grids of needles: scores by depth and length, per method."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.evaluation.samples import Sample
from kvsearch.results.evaluation import needle_grids
from kvsearch.tasks.niah import GridCell


def sample(method: str, length: int, depth: int, score: float, task: str = "niah") -> Sample:
    key = GridCell(length, depth).key
    numbers = (9, 9, 1, 5, 5.0, 5, 0.0, 0.0)
    return Sample(task, "retrieval", method, "question-agnostic", key, 0, "", score, "", False, *numbers)


SAMPLES = [
    sample("full", 1000, 0, 1.0), sample("plan", 1000, 0, 0.25), sample("full", 2000, 0, 1.0),
    sample("plan", 2000, 0, 0.5), sample("full", 1000, 100, 1.0), sample("plan", 1000, 100, 0.75),
    sample("plan", 1000, 50, 0.0, task="other"),
]  # fmt: skip


def test_a_grid_per_method() -> None:
    grids = needle_grids(SAMPLES)
    assert list(grids) == ["full", "plan"]
    assert (grids["plan"].depths, grids["plan"].lengths) == ((0, 100), (1000, 2000))
    assert grids["plan"].scores == ((0.25, 0.5), (0.75, None))
    assert needle_grids(SAMPLES[-1:]) == {}


def test_json() -> None:
    told = needle_grids(SAMPLES)["plan"].model_dump(mode="json")
    assert told == {
        "lengths": [1000, 2000], "depths": [0, 100], "scores": [[0.25, 0.5], [0.75, None]], "mean": 0.5,
    }  # fmt: skip
    assert json.loads(json.dumps(told, allow_nan=False)) == told


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((0, 40, 100)), st.floats(0, 1)), min_size=1))
def test_means_are_of_what_was_asked(asked: list[tuple[int, int, float]]) -> None:
    cells = {(length, depth): score for length, depth, score in asked}
    told = needle_grids([sample("m", *cell, score) for cell, score in cells.items()])["m"].model_dump()
    assert told["mean"] == pytest.approx(math.fsum(cells.values()) / len(cells))
    for row, depth in zip(told["scores"], told["depths"], strict=True):
        for score, length in zip(row, told["lengths"], strict=True):
            assert score == cells.get((length, depth))
