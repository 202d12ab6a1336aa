"""Tables and heat maps fit any page, and nothing of them is cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.report.evaluation import score_table
from kvsearch.report.figures import Figure, layer_map
from kvsearch.report.screen import WIDEST
from kvsearch.report.table import Table
from tests.evaluation.results import rendered
from tests.report.test_tables import comparison

WIDTHS = [60, 120, WIDEST]


def wide_table(columns: int) -> Table:
    rows = [[name, *(f"{name[0]}{n}.25" for n in range(columns))] for name in ("full", "uniform:snapkv")]
    return Table.plain("what is in here", ["method", *(f"task-{n}" for n in range(columns))], rows)


def heatmap(title: str, values: np.ndarray, layers: Sequence[int], form: str = "{:.0f}", total: str = "sum") -> Figure:
    return Figure("map", title, "", layer_map({"": values}, layers, "entries", form, total=total))


@given(columns=st.integers(1, 12), width=st.integers(40, 200))
def test_every_cell_is_there_at_any_width(columns: int, width: int) -> None:
    text = rendered([wide_table(columns)], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for n in range(columns):
        assert len(re.findall(rf"\b(?:f|u){n}\.25\b", text)) == 2
    names = text.count("uniform:snapkv")
    assert names == sum(line.split()[:1] == ["method"] for line in text.splitlines())  # in every block


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wide_model(width: int) -> None:
    """128 layers of 32 heads: numbers and sums, in as many blocks of columns as it takes."""
    values = np.arange(128 * 32).reshape(128, 32)
    text = rendered([heatmap("entries", values, range(128))], width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert f" {values[127].sum()}" in text
    assert " 4095 " in text


def test_more_heads_than_anybody_reads() -> None:
    text = rendered([heatmap("entries", np.full((200, 100), 3), range(200))], 140)
    assert "20,000 cells are too many for a map: --json has them all" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["199", "300"] in rows
    assert not any("h0" in row for row in rows)


def test_scores_on_the_screen_have_intervals() -> None:
    table = score_table(comparison(), by_task=False, intervals=True)
    assert "95% interval" in table.title
    assert all(re.fullmatch(r"\d+\.\d\d \[\d+\.\d, \d+\.\d\]", row[1].text) for row in table.groups[1][1])
    plain = score_table(comparison(), by_task=False)
    assert [[cell.best for cell in row] for row in table.groups[2][1]] == [
        [cell.best for cell in row] for row in plain.groups[2][1]
    ]
    for width in WIDTHS:
        assert "…" not in rendered([table], width)
