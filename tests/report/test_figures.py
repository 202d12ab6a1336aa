"""Figures: the numbers of each as CSV, and files where matplotlib is there."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from kvsearch.report.figures import draw
from kvsearch.report.figures.data import (
    RAMP,
    Axis,
    Figure,
    HeatMap,
    Intervals,
    LineChart,
    Panel,
    Series,
    is_light,
    shade,
)
from kvsearch.report.figures.draw import COLOURS, marks
from kvsearch.report.figures.results import score_figures
from kvsearch.runs.estimates import Estimate
from tests.report.test_tables import comparison

LINES = LineChart(
    Axis("entries", log=True),
    Axis("score, %"),
    (
        Series("full", (), (90.0,), style="level", muted=True),
        Series("snapkv", (8.0, 16.0), (1 / 3, 0.5), (0.1, 0.4), (0.6, 0.7)),
    ),
)
MAPS = HeatMap(("0", "5"), ("0", "1"), "layer", "kv head", "entries", (Panel("a", ((1.0, None), (2.0, 3.0))),))
MEANS = Intervals(Axis("points"), (("cosine", (("minus random", Estimate(1.0, -2.0, 4.0)),)),), unit=1)
FIGURES = [Figure(name, name, "how", body) for name, body in (("lines", LINES), ("maps", MAPS), ("means", MEANS))]


def table(figure: Figure) -> list[list[str]]:
    return list(csv.reader(io.StringIO(figure.csv())))


def test_the_numbers_of_every_kind_of_figure() -> None:
    lines, maps, means = map(table, FIGURES)
    assert lines == [
        ["series", "entries", "score, %", "low", "high"],
        ["full", "", "90.0", "", ""],
        ["snapkv", "8.0", "0.3333333333333333", "0.1", "0.6"],
        ["snapkv", "16.0", "0.5", "0.4", "0.7"],
    ]
    assert maps[0] == ["panel", "layer", "kv head", "entries"]
    assert maps[1:3] == [["a", "0", "0", "1.0"], ["a", "0", "1", ""]]
    assert means == [["group", "name", "points", "low", "high"], ["cosine", "minus random", "1.0", "-2.0", "4.0"]]


def test_scores_against_entries() -> None:
    """Two sizes of two methods, three tasks: the mean over tasks, and each task."""
    found = {one.name: one for one in score_figures(comparison())}
    assert list(found) == ["scores", "scores-a_1", "scores-b", "scores-c"]
    body = found["scores"].body
    assert isinstance(body, LineChart)
    assert [(one.name, one.style) for one in body.series] == [("full", "level"), ("uniform", "line"), ("lava", "line")]
    assert body.series[0].y == (pytest.approx(80.0),)
    uniform = body.series[1]
    assert sorted(uniform.y) == [pytest.approx(100 * 7 / 24), pytest.approx(50.0)]
    assert uniform.low is not None
    assert all(low <= y for low, y in zip(uniform.low, uniform.y, strict=True))
    assert "6 questions about 6 contexts" in found["scores"].caption


def test_shades_get_lighter() -> None:
    luma = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in (shade(at / 20) for at in range(21))]
    assert luma == sorted(luma)
    assert (shade(-1.0), shade(2.0)) == (RAMP[0], RAMP[-1])
    assert not is_light(shade(0.0))
    assert is_light(shade(1.0))


def test_pictures_are_written_the_same_each_time(tmp_path: Path) -> None:
    written = draw.write_figures(FIGURES, tmp_path / "a")
    assert [path.name for path in written[:3]] == ["lines.pdf", "lines.png", "lines.csv"]
    assert len(written) == 3 * len(FIGURES)
    assert (tmp_path / "a" / "maps.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a" / "maps.pdf").read_bytes().startswith(b"%PDF")
    draw.write_figures(FIGURES[:1], tmp_path / "b")
    for path in written[:3]:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_no_two_of_many_series_look_alike() -> None:
    looks = [(COLOURS[number % len(COLOURS)], *marks(number)) for number in range(24)]
    assert len(set(looks)) == len(looks)
    for colour in COLOURS:
        same = [look for look in looks if look[0] == colour]
        assert len({look[1] for look in same}) == len(same)  # in grey, too
        assert len({look[2] for look in same}) == len(same)


def test_names_are_data_for_matplotlib_too() -> None:
    name = "$x^{$ \\frac{ \x1b[2J {0}"
    lines = LineChart(
        Axis(name), Axis("y"), (Series(name, (1.0, 2.0), (1.0, 2.0)), Series("b", (1.0, 2.0), (2.0, 1.0)))
    )
    picture = draw.draw(Figure("f", name, "", lines))
    picture.draw_without_rendering()
    (axes,) = picture.axes
    shown = [axes.get_xlabel(), picture.get_suptitle(), *(text.get_text() for text in axes.get_legend().get_texts())]
    assert shown[:3] == [r"\$x^{\$ \frac{ \x1b[2J {0}"] * 3  # \$ is a dollar sign
    for body in (MAPS, MEANS):
        draw.draw(Figure("f", name, "", body)).draw_without_rendering()
