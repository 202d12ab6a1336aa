"""What is written of a comparison, and its tables."""

from __future__ import annotations

from typing import Any

from kvsearch.evaluation.compare import Comparison
from kvsearch.report.evaluation import tables
from kvsearch.report.table import Table
from kvsearch.results.evaluation import EvaluationResult


def json_of(comparison: Comparison) -> dict[str, Any]:
    return EvaluationResult.of(comparison).as_json()


def tables_of(comparison: Comparison) -> list[Table]:
    return tables(EvaluationResult.of(comparison))
