"""What is read of a result is written again byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import read_json
from kvsearch.results import Result, read_content
from kvsearch.results.evaluation import EvaluationResult, HeadroomResult
from kvsearch.results.search import SearchResult
from kvsearch.results.selection import RunResult, SelectionResult, SelectionsResult
from kvsearch.results.validation import ValidationResult

FILES = Path(__file__).parents[1] / "seeds"
RECORDS: dict[str, type[Result]] = {
    "evaluation": EvaluationResult,
    "evaluation-losses": EvaluationResult,
    "evaluation-needle": EvaluationResult,
    "headroom": HeadroomResult,
    "front": SearchResult,
    "run": RunResult,
    "search": SearchResult,
    "selection": SelectionResult,
    "validation": ValidationResult,
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_that_is_read_is_written_again(name: str) -> None:
    path = FILES / f"{name}.json"
    data = read_json(path)
    result = read_content(RECORDS[name], data, path)
    assert canonical_json(result.as_json()) == canonical_json(data)


def test_selections_at_several_budgets_are_written_again() -> None:
    path = FILES / "selection.json"
    data = read_json(path)
    several = {
        "schema": "kvsearch.selections/4",
        "sizes": {"64": {**data, "budget": 64}, "24": {**data, "budget": 24}},
    }
    result = read_content(SelectionsResult, several, path)
    assert canonical_json(result.as_json()) == canonical_json(several)
    assert [selection.size.budget for selection in result.choices] == [24, 64]


def test_results_of_another_version_are_refused_by_their_name() -> None:
    path = FILES / "run.json"
    data = read_json(path)
    with pytest.raises(UsageError, match=r"run.json is of another version of kvsearch .*run-report/1.*run-report/4"):
        read_content(RunResult, {**data, "schema": "kvsearch.run-report/1"}, path)
