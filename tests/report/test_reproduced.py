"""A table beside the paper's numbers: cells, marks, and the rows of the paper."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvsearch.papers.tables import Picture, find_table
from kvsearch.report import charts
from kvsearch.report.charts import make_table_figures
from kvsearch.report.figures import LineChart, Series
from kvsearch.report.paper_table import MeasuredCell, ReproducedTable, compare_solvers, make_reproduced_table
from kvsearch.report.table import to_markdown
from kvsearch.runs.estimates import Estimate

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


def test_a_selection_is_beside_the_papers() -> None:
    table = find_table("polykv-table1")
    finalists = [SimpleNamespace(name="cosine"), SimpleNamespace(name="ppl")]
    scores = {"full": 0.9, "cake": 0.5, "cosine": 0.6, "ppl": 0.4}
    chosen = {"best": "cake", "winner": None, "written": "cake", "verdict": "baseline", "leader": finalists[0]}
    selection = SimpleNamespace(
        chosen=SimpleNamespace(**chosen, list_foremost=lambda kind, count: finalists[:count]),
        report=SimpleNamespace(scores={name: Estimate(mean, mean, mean) for name, mean in scores.items()}),
    )
    finished = replace(table.stages(table.bundled)[1], result=selection, remarks=("d2o is left out: why",))
    content = {"model": "Qwen/Qwen3-8B", "options": {}, "stages": ()}
    found = make_reproduced_table(table, [finished], content, short=False, own_tasks=False)
    other = make_reproduced_table(table, [finished], {**content, "model": "m"}, short=False, own_tasks=False)
    assert all(cell.paper is None for cell in other.cells)
    rows = [line for line in to_markdown(found.tables()[0]).splitlines() if line.startswith("| LongBench")]
    assert rows == [
        "| LongBench | 90.00 | 50.00 (cake) | 60.00 (cosine) | 40.00 to 60.00 | +10.00 | baseline |",
        "| LongBench, paper | 49.11 | 47.01 | 47.54 |  | 0.54 |  |",
    ]
    assert found.notes[0] == "d2o is left out: why"
    assert found.notes[1] == "LongBench: no strategy beats the best single policy beyond doubt, the plan is cake"


def pictured(monkeypatch: pytest.MonkeyPatch, picture: Picture, cells: tuple[MeasuredCell, ...]) -> dict[str, object]:
    monkeypatch.setattr(charts, "PAPER_TABLES", {"x-table1": SimpleNamespace(pictures=(picture,))})
    return {figure.name: figure.body for figure in make_table_figures(made(cells))}


def test_a_picture_has_lines_over_the_numbers_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        MeasuredCell("Full", "a b", 90.0), MeasuredCell("X", "a b", 60.0, "1,024 entries"),
        MeasuredCell("X", "a b", 40.0, "128 entries"), MeasuredCell("X", "c", 1.0, "128 entries", "", 0.5, 2.0),
        MeasuredCell("X", "d", None, "128 entries"), MeasuredCell("X", "other", 3.0, "128 entries"),
    )  # fmt: skip
    picture = Picture("f", "Figure 1", "row", "block", "column", ("entries", "score"), of="a b|c|d")
    assert pictured(monkeypatch, picture, cells) == {
        "f-a-b": LineChart("entries", "score", (
            Series("Full", (), (90.0,), style="level", role="muted"), Series("X", (128.0, 1024.0), (40.0, 60.0)),
        )),
        "f-c": LineChart("entries", "score", (Series("X", (128.0,), (1.0,), (0.5,), (2.0,)),)),
    }  # fmt: skip
