"""`kvsearch plan diff`: tables for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.plan import save_plan
from tests.cli.conftest import Run
from tests.plan.builders import PROVENANCE, make_plan, phase_dict


def written(path: Path, budgets: list[list[int] | None] | None = None, **changes: Any) -> Path:
    save_plan(make_plan(budgets, **changes), path)
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return written(tmp_path / "a.json")


def cells(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_equal_plans(run: Run, a: Path, tmp_path: Path) -> None:
    b = written(tmp_path / "b.json", provenance={**PROVENANCE, "seed": 1})
    assert run("plan", "diff", a, b) == (0, "the plans are equal\n", "")
    code, out, _ = run("plan", "diff", a, b, "--json")
    assert code == 0
    assert json.loads(out) == {"equal": True, "settings": [], "budgets": [], "totals": {"prefill": [32, 32]}}


def test_tables_show_what_differs(run: Run, a: Path, tmp_path: Path) -> None:
    more = phase_dict([[8, 8], None, None])
    b = written(tmp_path / "b.json", [[10, 7], [5, 5], [4, 12]], length=50, decode=more)
    code, out, _ = run("plan", "diff", a, b)
    assert code == 0
    found = cells(out)
    assert ["A", str(a)] in found
    assert ["B", str(b)] in found
    assert ["length", "40", "50"] in found
    assert ["prefill", "1", "policy", "-", "snapkv"] in found
    assert ["decode", "0", "policy.window", "-", "4"] in found
    assert ["0", "16", "17", "+1", "10", "6", "10", "7"] in found
    assert ["1", "-", "10", "-", "-", "5", "5"] in found
    assert ["total", "32", "43", "+11"] in found
    assert ["total", "-", "16", "-"] in found
    assert not any(row[:2] == ["2", "16"] for row in found)  # layer 2 is the same


def test_json_holds_everything(run: Run, a: Path, tmp_path: Path) -> None:
    b = written(tmp_path / "b.json", [[10, 7], None, [4, 12]], floor=2)
    code, out, _ = run("plan", "diff", a, b, "--json")
    assert code == 0
    assert json.loads(out) == {
        "equal": False,
        "settings": [
            {"name": "floor", "before": 4, "after": 2, "phase": None, "layers": []},
            {"name": "total", "before": 32, "after": 33, "phase": "prefill", "layers": []},
        ],
        "budgets": [{"phase": "prefill", "layer": 0, "head": 1, "before": 6, "after": 7}],
        "totals": {"prefill": [32, 33]},
    }
