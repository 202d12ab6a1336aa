"""A table beside the paper's numbers: cells, marks, and the rows of the paper."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvsearch.benchmark.cache_costs import CacheCosts
from kvsearch.papers.tables import Picture, find_table
from kvsearch.report import charts
from kvsearch.report.charts import make_table_figures
from kvsearch.report.figures import HeatMap, LineChart, Series
from kvsearch.report.paper_table import (
    MeasuredCell,
    ReproducedTable,
    compare_solvers,
    list_costs,
    list_needles,
    list_searches,
    make_reproduced_table,
)
from kvsearch.report.table import to_markdown
from kvsearch.results.evaluation import NeedleGrid
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


def test_blocks_without_a_common_column_are_tables_of_their_own() -> None:
    cells = (*CELLS, MeasuredCell("A", "layer 0", 3.0, "loss"), MeasuredCell("A", "layer 1", 4.0, "loss"))
    first, second = made(cells).tables()
    assert (first.header, second.header) == (["", "average", "vt"], ["", "layer 0", "layer 1"])
    assert (first.above, first.notes, second.above, second.notes) == (("asked: vt",), (), (), ("not as in the paper",))
    assert second.title == "X, Table 1 (continued)"


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


def test_a_picture_leaves_totals_of_columns_out_and_maps_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        MeasuredCell("X", "layer 0", 2.0), MeasuredCell("X", "layer 3", 4.0), MeasuredCell("X", "all", 6.0),
        MeasuredCell("Y", "layer 3", 5.0),
    )  # fmt: skip
    lines = Picture("f", "Figure 1", "row", "column", "block", ("layer", "loss"))
    (chart,) = pictured(monkeypatch, lines, cells).values()
    assert chart == LineChart("layer", "loss", (Series("X", (0.0, 3.0), (2.0, 4.0)), Series("Y", (3.0,), (5.0,))))
    maps = replace(lines, labels=("method", "layer", "share"), relative=True)
    (body,) = pictured(monkeypatch, maps, (*cells[:2], *cells[3:])).values()
    panels = {"": ((0.5, 1.0), (None, 1.0))}
    assert body == HeatMap(("X", "Y"), ("layer 0", "layer 3"), "method", "layer", "share", panels, "{:.2g}")


def test_costs_are_by_the_length_of_prompts_or_replies() -> None:
    table = find_table("evolkv-figure8a")
    cost = CacheCosts("plans/1/uniform.json", 1, 4096, 8.0, 5, 3_000_000, 2.0, 1.0, 0.5, 2.0, 1.0, 0.1, 0.1)
    result = SimpleNamespace(costs=(cost, replace(cost, cache="StaticCache"), replace(cost, cache="DynamicCache")))
    stage = replace(table.stages(table.bundled)[-1], result=result)
    found = [(cell.row, cell.column, cell.value, cell.block) for cell in list_costs(table, [stage])]
    assert found == [(name, "32 new tokens", 18.0, "inference, s") for name in ("SnapKV", "Full")]
    memory = next(list_costs(find_table("evolkv-figure8b"), [stage]))
    assert (memory.column, memory.value, memory.block) == ("4,096 tokens", 3.0, "peak memory, MB")


def test_needles_are_maps_and_searches_their_best_so_far() -> None:
    table = find_table("evolkv-figure7")
    grid = NeedleGrid(lengths=(1000,), depths=(0, 50), scores=((1.0,), (None,)), mean=1.0)
    method = SimpleNamespace(label="uniform@32")
    sized = SimpleNamespace(size=32, method=lambda name: method if name == "uniform" else None)
    result = SimpleNamespace(blocks=(sized,), needle={"full": grid, "uniform@32": grid})
    stages = table.stages(table.bundled)
    found = list(list_needles(table, [replace(stages[-1], result=result)]))
    assert [cell.block for cell in found] == ["Full, mean 100.0", "SnapKV, mean 100.0"]
    assert {(cell.row, cell.column, cell.value) for cell in found} == {("0% deep", "1,000 tokens", 100.0)}
    told = [(4, SimpleNamespace(values=[-1.0, -3.0])), (8, SimpleNamespace(values=[-2.0, -2.5]))]
    trace = SimpleNamespace(generations=told)
    assert [cell.value for cell in list_searches(table, [replace(stages[0], trace=trace)])] == [3.0, 3.0]
