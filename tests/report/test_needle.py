"""Grids of needles: scores by depth and length, per method."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvsearch.evaluation.samples import Sample
from kvsearch.report.needle import RAMP, _colour, grid_table, grids_json, needle_grids
from kvsearch.tasks.niah import Grid, GridCell


def sample(method: str, length: int, depth: int, score: float, task: str = "niah") -> Sample:
    key = GridCell(length, depth).key
    numbers = (9, 9, 1, 5, 5.0, 5, 0.0, 0.0)
    return Sample(task, "retrieval", method, "question-agnostic", key, 0, "", score, "", False, *numbers)


SAMPLES = [
    sample("full", 1000, 0, 1.0), sample("plan", 1000, 0, 0.25), sample("full", 2000, 0, 1.0),
    sample("plan", 2000, 0, 0.5), sample("full", 1000, 100, 1.0), sample("plan", 1000, 100, 0.75),
    sample("plan", 1000, 50, 0.0, task="other"),
]  # fmt: skip


def shown(grid: Grid, **options: object) -> str:
    console = Console(width=100, file=io.StringIO(), **options)  # type: ignore[arg-type]
    console.print(grid_table("plan", grid))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_grid_per_method() -> None:
    grids = needle_grids(SAMPLES)
    assert list(grids) == ["full", "plan"]
    assert (grids["plan"].depths, grids["plan"].lengths) == ((0, 100), (1000, 2000))
    np.testing.assert_array_equal(grids["plan"].means, [[0.25, 0.5], [0.75, np.nan]])
    assert needle_grids(SAMPLES[-1:]) == {}


def test_json() -> None:
    told = grids_json(needle_grids(SAMPLES))
    assert told["plan"] == {
        "lengths": [1000, 2000], "depths": [0, 100], "scores": [[0.25, 0.5], [0.75, None]], "mean": 0.5,
    }  # fmt: skip
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_the_table() -> None:
    text = shown(needle_grids(SAMPLES)["plan"])
    assert "\x1b" not in text
    rows = [line.split() for line in text[text.index("depth  ") :].splitlines() if line.strip()]
    assert rows[0] == ["depth", "1000", "2000", "mean"]
    assert rows[2:] == [["0%", "0.25", "0.50", "0.38"], ["100%", "0.75", "-", "0.75"], ["mean", "0.50", "0.50", "0.50"]]


def test_cells_have_the_colour_of_their_score() -> None:
    text = shown(Grid((0,), (10, 20), np.array([[0.0, 1.0]])), force_terminal=True, color_system="truecolor")
    for low, score in ((RAMP[0], "0.00"), (RAMP[-1], "1.00")):
        assert f"48;2;{';'.join(map(str, low))}m  {score}" in text


def test_colours_by_hand() -> None:
    assert [_colour(score) for score in (0.0, 0.5, 1.0)] == list(RAMP)
    assert _colour(0.25) == (217, 115, 65)


@given(st.floats(-0.1, 1.1), st.floats(0, 0.01))
def test_near_scores_have_near_colours(score: float, step: float) -> None:
    one, other = _colour(score), _colour(score + step)
    assert all(0 <= part <= 255 for part in one)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 2 * 200 * step + 1


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((0, 40, 100)), st.floats(0, 1)), min_size=1))
def test_means_are_of_what_was_asked(asked: list[tuple[int, int, float]]) -> None:
    cells = {(length, depth): score for length, depth, score in asked}
    told = grids_json(needle_grids([sample("m", *cell, score) for cell, score in cells.items()]))["m"]
    assert told["mean"] == pytest.approx(math.fsum(cells.values()) / len(cells))
    for row, depth in zip(told["scores"], told["depths"], strict=True):
        for score, length in zip(row, told["lengths"], strict=True):
            assert score == cells.get((length, depth))
