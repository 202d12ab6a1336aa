"""Tables as text: which columns, what is marked, and how it is written."""

from __future__ import annotations

import csv as files
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.evaluation.compare import Evaluation, Split
from kvsearch.evaluation.ready_methods import ReadyMethod
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import MACRO, make_blocks
from kvsearch.plan import Size
from kvsearch.report.evaluation import make_difference_table, make_tables, score_table, write_tables
from kvsearch.report.table import Cell, Table, to_latex
from kvsearch.results.evaluation import EvaluationResult, make_needle_grids
from kvsearch.runtime import Program
from kvsearch.runtime.program import PhaseProgram
from kvsearch.tasks.base import Coverage
from kvsearch.tasks.niah import GridCell
from tests.evaluation.results import as_if

MEANS = {  # of two tasks of one category and one of another
    "full": (1.0, 0.8, 0.6), "uniform@8": (0.5, 0.25, 0.125), "lava@8": (0.625, 0.25, 0.0),
    "uniform@0.5": (0.75, 0.5, 0.25), "lava@0.5": (0.5, 0.5, 0.25),
}  # fmt: skip
MACRO_DIFFERENCE = "+0.00 [-45.44, +45.44] 2 / 2 / 2"
TASKS = {"a_1": "qa", "b": "qa", "c": "code"}
SIZES: dict[str, Size] = {"8": Size(8), "0.5": Size(ratio=0.5)}


def method(label: str) -> ReadyMethod:
    name, _, size = label.partition("@")
    phase = PhaseProgram({}, lambda length: np.full((0, 1), length))
    return ReadyMethod(name, Program(None if name == "full" else phase), {}, SIZES.get(size))


def comparison(
    subject: str = "uniform", tasks: dict[str, str] = TASKS, **averages: tuple[str, ...]
) -> EvaluationResult:
    """Both questions of a task score the same."""
    samples = [
        Sample(task, category, label, "question-agnostic", str(n), 0, "", score, "", False, 9, 9, 1,
               72 if label == "full" else 16, 1024.0, 80, 0.1, 0.1)
        for label, means in MEANS.items()
        for (task, category), score in zip(tasks.items(), (means * 9)[: len(tasks)], strict=True)
        for n in range(2)
    ]  # fmt: skip
    ready = tuple(map(method, MEANS))
    covered = [Coverage(task, category, 2, 2, 2, 0, 2, {}) for task, category in tasks.items()]
    named = {MACRO: tuple(tasks), **averages}
    blocks = make_blocks(samples, ready, subject, named)
    asked = [SimpleNamespace(name=task, metric="exact", traced=False) for task in tasks]
    pairs = zip(asked, covered, strict=True)
    encoded: Any = [
        SimpleNamespace(task=one, coverage=of, prompts=(), distinct=of.contexts, sampling=None) for one, of in pairs
    ]
    model: Any = SimpleNamespace(name="m", model=None)
    found = Evaluation(model, ready, subject, encoded, Split(()), samples=samples)
    known = {"averages": named, "blocks": blocks, "contexts": None, "seen": {}, "decode_entries": {}}
    return EvaluationResult.of(as_if(found, **known, environment={}, most_tokens=None))


def shown(table: Table) -> list[list[str]]:
    return [[("*" if cell.best else "") + cell.text for cell in row] for _, rows in table.groups for row in rows]


def test_scores_in_percent_with_the_best_of_each_block() -> None:
    table = score_table(comparison())
    assert table.title == "m: score in percent (question-agnostic, phases: prefill, 6 questions about 6 contexts)"
    assert table.header == ["method", "macro", "a_1", "b", "c", "qa", "code"]
    assert [heading for heading, _ in table.groups] == ["", "8 entries per kv head", "50% evicted"]
    assert shown(table) == [
        ["full", "80.00", "100.00", "80.00", "60.00", "90.00", "60.00"],
        ["uniform", "29.17", "50.00", "25.00", "*12.50", "37.50", "*12.50"],
        ["lava", "29.17", "*62.50", "25.00", "0.00", "*43.75", "0.00"],
        ["uniform", "*50.00", "*75.00", "50.00", "25.00", "*62.50", "25.00"],
        ["lava", "41.67", "50.00", "50.00", "25.00", "50.00", "25.00"],
    ]


def test_columns() -> None:
    assert score_table(comparison(), by_task=False).header == ["method", "macro", "qa", "code"]
    named = comparison(paper=("a_1", "c"), other=("c", "a_1"), whole=("c", "b", "a_1"))
    assert score_table(named, by_task=False).header == ["method", "macro = whole", "paper = other", "qa", "code"]
    assert shown(score_table(named, by_task=False))[1][:3] == ["uniform", "29.17", "31.25"]
    alone = comparison(tasks={"a_1": "qa"})
    for by_task in (True, False):
        assert score_table(alone, by_task=by_task).header == ["method", "a_1"]
    assert make_tables(comparison(), on_screen=True)[0].header == score_table(comparison()).header
    many = comparison(tasks={f"t{n}": "qa" for n in range(13)})
    assert make_tables(many, on_screen=True)[0].header == ["method", "macro"]
    assert len(make_tables(many)[0].header) == 15


def test_differences_to_the_subject() -> None:
    table = make_difference_table(comparison())
    assert "paired difference to uniform" in table.title
    (full, lava), (_, other) = (rows for _, rows in table.groups)
    assert [cell.text for cell in lava] == [
        "lava", MACRO_DIFFERENCE,
        "+6.25 [4 contexts: no interval] 2 / 2 / 0", "-12.50 [2 contexts: no interval] 0 / 0 / 2", "1 / 1 / 1",
    ]  # fmt: skip
    assert (full[0].text, full[3].text) == ("full", "+47.50 [2 contexts: no interval] 2 / 0 / 0")
    assert other[2].text == "-12.50 [4 contexts: no interval] 0 / 2 / 2"
    to_full = make_difference_table(comparison("full"))
    assert [[row[0].text for row in rows] for _, rows in to_full.groups] == [["uniform", "lava"]] * 2


SMALL = Table(
    "m_1: 50% | more",
    ["method", "a_1"],
    [
        ("", [[Cell("full"), Cell("1.00")]]),
        ("8 a|b", [[Cell("ada-2"), Cell("-1.00 [-2.00, +3.00]", best=True)]]),
    ],
    ("all & sundry",),
)  # fmt: skip


def test_latex() -> None:
    assert to_latex(SMALL).splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{m\_1: 50\% | more. All \& sundry.}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"method & a\_1 \\",
        r"\midrule",
        r"full & 1.00 \\",
        r"\midrule",
        r"\multicolumn{2}{l}{\emph{8 a|b}} \\",
        r"ada-2 & \textbf{$-$1.00 [$-$2.00, +3.00]} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_csv_has_every_number(tmp_path: Path) -> None:
    write_tables(comparison(), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(files.DictReader(file))
    assert len(rows) == 2 * 3 * 6
    (one,) = (row for row in rows if (row["size"], row["method"], row["column"]) == ("0.5", "lava", "a_1"))
    assert (float(one["score"]), float(one["difference"]), one["losses"]) == (0.5, -0.25, "2")
    assert (one["kind"], one["questions"], one["subject"], float(one["entries"])) == ("task", "2", "uniform", 16)
    assert {(row["protocol"], row["phases"]) for row in rows} == {("question-agnostic", "prefill")}
    (own,) = (row for row in rows if (row["size"], row["method"], row["column"]) == ("8", "uniform", "qa"))
    assert (own["kind"], own["difference"], own["wins"]) == ("category", "", "")


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
    grids = make_needle_grids(SAMPLES)
    assert list(grids) == ["full", "plan"]
    assert (grids["plan"].depths, grids["plan"].lengths) == ((0, 100), (1000, 2000))
    assert grids["plan"].scores == ((0.25, 0.5), (0.75, None))
    assert make_needle_grids(SAMPLES[-1:]) == {}


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((0, 40, 100)), st.floats(0, 1)), min_size=1))
def test_means_are_of_what_was_asked(asked: list[tuple[int, int, float]]) -> None:
    cells = {(length, depth): score for length, depth, score in asked}
    told = make_needle_grids([sample("m", *cell, score) for cell, score in cells.items()])["m"].model_dump()
    assert told["mean"] == pytest.approx(math.fsum(cells.values()) / len(cells))
    for row, depth in zip(told["scores"], told["depths"], strict=True):
        for score, length in zip(row, told["lengths"], strict=True):
            assert score == cells.get((length, depth))
