from __future__ import annotations

import re
from urllib.parse import unquote

import pytest

from kvsearch.report.page.tables import page_table, sort_key
from kvsearch.report.table import Cell, RowGroup, Table

SCORES = Table(
    "score in percent",
    ["method", "score", "difference"],
    [
        RowGroup("64 entries", [
            [Cell("uniform"), Cell("20.00 [10.00, 30.00]"), Cell("")],
            [Cell("joint, best"), Cell("40.00 [30.00, 50.00]", best=True), Cell("+20.00 [+5.00, +35.00] 3 / 1 / 0")],
        ]),
    ],
    ("a note",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("61.30", 61.3), ("+3.1 points [+1.2, +5.0]", 3.1), ("-0.50 [-1.00, +0.00]", -0.5), ("1,536", 1536),
        ("<0.001", 0.001), ("45% (20% to -)", 45), ("2e-05", 2e-5), ("12 / 3 / 1", 12), ("", None), ("-", None),
        ("snapkv", None), ("4-bit", None), ("#1", None), ("1.2.3", None),
    ],
)  # fmt: skip
def test_cells_sort_by_the_number_that_they_begin_with(text: str, key: float | None) -> None:
    assert sort_key(text) == key


def test_intervals_of_a_column_are_drawn_on_one_scale() -> None:
    (first, second) = page_table(SCORES, "scores").groups[0].rows
    strips = [row[1].strip or "" for row in (first, second)]
    places = [[float(one) for one in re.findall(r'(?:x1|x2|cx)="([\d.]+)%"', strip)] for strip in strips]
    (low, high, mean), (other_low, _, _) = places
    assert low < mean < high
    assert other_low == high
    assert mean == pytest.approx((low + high) / 2, abs=0.2)
    assert "zero" not in (first[1].strip or "")
    assert 'class="zero"' in (second[2].strip or "")
    assert (first[2].strip, first[0].strip) == (None, None)


def test_intervals_of_no_width_are_not_drawn() -> None:
    table = Table.plain("t", ["method", "score"], [["full", "100.00 [100.00, 100.00]"]])
    assert page_table(table, "t").groups[0].rows[0][1].strip is None


def test_the_csv_has_all_cells_and_the_headings_of_groups() -> None:
    lines = unquote(page_table(SCORES, "scores").link.partition(",")[2]).splitlines()
    assert lines[0] == "group,method,score,difference"
    assert lines[2] == '64 entries,"joint, best","40.00 [30.00, 50.00]","+20.00 [+5.00, +35.00] 3 / 1 / 0"'
