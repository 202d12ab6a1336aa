"""Several budgets in one search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.models.loading import LoadedModel
from kvsearch.report.search import make_search_result, make_tables
from kvsearch.search.evaluators import make_executor
from kvsearch.search.evolve import Evolved, PreparedSearch, prepare_searches, run_searches
from kvsearch.search.start_plans import SearchSetup
from kvsearch.search.trials import TrialLog
from tests.search.evolving import POLICY, settings_of, splits
from tests.search.searching import NullReporter, told

pytestmark = pytest.mark.slow
BUDGETS = 8, 16, 24


def prepare(loaded: LoadedModel, *budgets: int) -> tuple[PreparedSearch, ...]:
    base = SearchSetup.of(loaded, POLICY)
    return prepare_searches(base, {budget: {} for budget in budgets}, settings_of(generations=1), splits())


def run(
    searches: tuple[PreparedSearch, ...], path: Path, watcher: NullReporter | None = None, allowed: int | None = None
) -> list[Evolved]:
    with (
        make_executor(searches[0], cap=max(one.cap for one in searches)) as executor,
        TrialLog(path) as ledger,
    ):
        return run_searches(searches, executor, ledger, allowed, watcher or NullReporter())


@pytest.fixture(scope="module")
def found(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Evolved], Path, NullReporter]:
    path, watcher = tmp_path_factory.mktemp("front") / "ledger.jsonl", NullReporter()
    return run(prepare(loaded, 8, 16, 24), path, watcher), path, watcher


def test_every_budget_has_a_plan_of_its_size(found: tuple[list[Evolved], Path, NullReporter]) -> None:
    points, _, watcher = found
    assert [point.search.budget for point in points] == list(BUDGETS)
    assert [point.choice.plan.total for point in points] == [24 * budget for budget in BUDGETS]
    assert [stage for stage in watcher.stages if "start" in stage] == [f"budget {n}: start plans" for n in BUDGETS]
    assert watcher.ends == [f"budget {n}: all stages are finished" for n in BUDGETS]


@pytest.mark.nightly
def test_a_direct_search_does_not_know_the_plan_that_it_is_compared_with(
    found: tuple[list[Evolved], Path, NullReporter], loaded: LoadedModel, tmp_path: Path
) -> None:
    """What is found at 16 entries is the same whatever was found at a smaller budget."""
    points, _, _ = found
    assert [list(point.search.starts) for point in points] == [["uniform", "pyramid"]] * 3
    (_, alone) = run(prepare(loaded, 12, 16), tmp_path / "l")
    assert told(alone.outcome) == told(points[1].outcome)
    assert alone.choice.plan == points[1].choice.plan
    assert list(alone.choice.finalists) == list(points[1].choice.finalists)


def test_the_front_as_json_and_as_a_table(found: tuple[list[Evolved], Path, NullReporter]) -> None:
    points, _, _ = found
    result = make_search_result(points, 1, 2)
    data = result.as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data["found"]) == ["8", "16", "24"]
    assert data["found"]["16"]["budgets"] == points[1].choice.table.tolist()
    assert "expanded" in data["found"]["24"]["gains"]
    (table,) = make_tables(result)
    rows = [[cell.text for cell in row] for row in table.groups[0][1]]
    assert [row[0] for row in rows] == ["full", "8", "16", "24"]
    assert rows[1][2] == ""
    assert all(rows[2])
