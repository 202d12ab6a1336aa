"""What is written of a comparison, and its tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvsearch.evaluation.compare import Comparison
from kvsearch.report.evaluation import tables
from kvsearch.report.table import Table
from kvsearch.results.evaluation import EvaluationResult


def json_of(comparison: Comparison) -> dict[str, Any]:
    return EvaluationResult.of(comparison).as_json()


def as_if(comparison: Comparison, **known: Any) -> Comparison:
    """The same comparison, with these of the properties that it works out."""
    told = replace(comparison)
    vars(told).update(known)
    return told


def tables_of(comparison: Comparison) -> list[Table]:
    return tables(EvaluationResult.of(comparison))
