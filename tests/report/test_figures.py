"""Figures, and tables on screens of any width."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.report import draw
from kvsearch.report.charts import make_score_figures
from kvsearch.report.figures import Figure, HeatMap, LineChart, Series
from kvsearch.report.table import Table
from tests.evaluation.results import rendered
from tests.report.test_tables import comparison

LINES = LineChart(
    "entries",
    "score, %",
    (
        Series("full", (), (90.0,), style="level", role="muted"),
        Series("snapkv", (8.0, 16.0), (1 / 3, 0.5), (0.1, 0.4), (0.6, 0.7)),
    ),
    log_x=True,
)
MAPS = HeatMap(("0", "5"), ("0", "1"), "layer", "kv head", "entries", {"a": ((1.0, None), (2.0, 3.0))})
FIGURES = [Figure(name, name, "how", body) for name, body in (("lines", LINES), ("maps", MAPS))]


def table(figure: Figure) -> list[list[str]]:
    return list(csv.reader(io.StringIO(figure.csv())))


def test_the_numbers_of_every_kind_of_figure() -> None:
    lines, maps = map(table, FIGURES)
    assert lines == [
        ["series", "entries", "score, %", "low", "high"],
        ["full", "", "90.0", "", ""],
        ["snapkv", "8.0", "0.3333333333333333", "0.1", "0.6"],
        ["snapkv", "16.0", "0.5", "0.4", "0.7"],
    ]
    assert maps[0] == ["panel", "layer", "kv head", "entries"]
    assert maps[1:3] == [["a", "0", "0", "1.0"], ["a", "0", "1", ""]]


def test_scores_against_entries() -> None:
    """Two sizes of two methods, three tasks: the mean over tasks."""
    found = {one.name: one for one in make_score_figures(comparison())}
    assert list(found) == ["scores"]
    body = found["scores"].body
    assert [(one.name, one.style) for one in body.series] == [("full", "level"), ("uniform", "line"), ("lava", "line")]
    assert body.series[0].y == (pytest.approx(80.0),)
    uniform = body.series[1]
    assert sorted(uniform.y) == [pytest.approx(100 * 7 / 24), pytest.approx(50.0)]
    assert all(low <= y for low, y in zip(uniform.low, uniform.y, strict=True))
    assert "6 questions about 6 contexts" in found["scores"].caption


@pytest.mark.parametrize(("lowest", "label"), [(63.0, "score, % (axis cut at 60)"), (3.0, "score, %")])
def test_an_axis_that_begins_above_zero_says_so(lowest: float, label: str) -> None:
    lines = LineChart("x", "score, %", (Series("a", (1.0, 2.0), (lowest, 95.0)),))
    (axes,) = draw.draw(Figure("f", "f", "", lines)).axes
    assert axes.get_ylabel() == label


def test_pictures_are_written_the_same_each_time(tmp_path: Path) -> None:
    written = draw.write_figures(FIGURES, tmp_path / "a")
    assert [path.name for path in written[:3]] == ["lines.pdf", "lines.png", "lines.csv"]
    assert len(written) == 3 * len(FIGURES)
    assert (tmp_path / "a" / "maps.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a" / "maps.pdf").read_bytes().startswith(b"%PDF")
    draw.write_figures(FIGURES[:1], tmp_path / "b")
    for path in written[:3]:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_names_are_data_for_matplotlib_too() -> None:
    name = "$x^{$ \\frac{ \x1b[2J {0}"
    lines = LineChart(name, "y", (Series(name, (1.0, 2.0), (1.0, 2.0)), Series("b", (1.0, 2.0), (2.0, 1.0))))
    picture = draw.draw(Figure("f", name, "", lines))
    picture.draw_without_rendering()
    (axes,) = picture.axes
    shown = [axes.get_xlabel(), picture.get_suptitle(), *(text.get_text() for text in axes.get_legend().get_texts())]
    assert shown[:3] == [r"\$x^{\$ \frac{ \x1b[2J {0}"] * 3  # \$ is a dollar sign
    draw.draw(Figure("f", name, "", MAPS)).draw_without_rendering()


def wide_table(columns: int) -> Table:
    rows = [[name, *(f"{name[0]}{n}.25" for n in range(columns))] for name in ("full", "uniform:snapkv")]
    return Table.plain("what is in here", ["method", *(f"task-{n}" for n in range(columns))], rows)


@given(columns=st.integers(1, 12), width=st.integers(40, 200))
def test_every_cell_is_there_at_any_width(columns: int, width: int) -> None:
    text = rendered([wide_table(columns)], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for n in range(columns):
        assert len(re.findall(rf"\b(?:f|u){n}\.25\b", text)) == 2
    names = text.count("uniform:snapkv")
    assert names == sum(line.split()[:1] == ["method"] for line in text.splitlines())  # in every block
