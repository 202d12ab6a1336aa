"""A table beside the paper's numbers: cells, marks, and the rows of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.report.paper_table import MeasuredCell, ReproducedTable, compare_solvers
from kvsearch.report.table import to_markdown

CELLS = (
    MeasuredCell("Full", "average", 90.0, paper=91.0),
    MeasuredCell("A", "average", 51.234, "128 entries", "128", 50.0, 52.0, paper=55.5, ranked=True),
    MeasuredCell("A", "vt", 10.0, "128 entries", "128", ranked=True),
    MeasuredCell("B", "average", 40.0, "128 entries", "128", ranked=True),
    MeasuredCell("B", "vt", None, "128 entries", "128", text="left out"),
)


def made(cells: tuple[MeasuredCell, ...] = CELLS) -> ReproducedTable:
    said = {"caption": ("asked: vt",), "notes": ("not as in the paper",)}
    return ReproducedTable(table="x-table1", title="X, Table 1", cells=cells, model="m", options={}, stages=(), **said)


def test_the_paper_stands_below_the_rows_that_it_has() -> None:
    lines = to_markdown(made().tables()[0]).splitlines()
    assert lines[0] == "**X, Table 1**"
    rows = [line for line in lines if line.startswith("|")]
    assert rows == [
        "|  | average | vt |", "| --- | ---: | ---: |", "| Full | 90.00 |  |", "| Full, paper | 91.00 |  |",
        "| *128 entries* |  |  |", "| A | **51.23** | 10.00 |", "| A, paper | 55.50 |  |", "| B | 40.00 | left out |",
    ]  # fmt: skip


@pytest.mark.parametrize("concave", [True, False])
def test_solvers_keep_the_same_of_concave_curves_alone(concave: bool) -> None:
    steps = np.random.default_rng(0).pareto(1.0, (2, 2, 100))
    steps = -np.sort(-steps) if concave else steps
    curves = np.insert(steps.cumsum(-1), 0, 0.0, axis=-1)  # [L, Hkv, 101]
    shares = {(name, evicted): kept for name, evicted, kept in compare_solvers(curves)}
    gaps = [shares["exact", evicted] - shares["greedy", evicted] for evicted in range(5, 100, 5)]
    assert min(gaps) > -1e-9
    assert (max(gaps) < 1e-9) == concave
    best = np.sort(steps, axis=None)[-200:].sum() / steps.sum()
    assert shares["exact", 50] == pytest.approx(best) if concave else shares["exact", 50] < best


def test_every_cell_is_a_line_of_the_csv() -> None:
    header, *lines = made().csv().splitlines()
    assert header == "table,block,row,column,value,low,high,text,paper"
    assert len(lines) == len(CELLS)
    assert lines[1] == "x-table1,128 entries,A,average,51.234,50.0,52.0,,55.5"
    assert made().as_json()["cells"][4] == {
        "row": "B", "column": "vt", "value": None, "block": "128 entries", "key": "128", "low": None, "high": None,
        "text": "left out", "paper": None, "ranked": False,
    }  # fmt: skip
