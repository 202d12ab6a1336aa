"""What is written of a comparison, its tables, and what rich prints of them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from kvsearch.cli.console import Screen
from kvsearch.evaluation.compare import Evaluation
from kvsearch.evaluation.samples import Sample
from kvsearch.report.evaluation import make_tables
from kvsearch.report.figures import Figure
from kvsearch.report.screen import to_printable
from kvsearch.report.table import Table
from kvsearch.results.evaluation import EvaluationResult

PLACE = attrgetter("place")


def json_of(comparison: Evaluation) -> dict[str, Any]:
    return EvaluationResult.of(comparison).as_json()


def as_if(comparison: Evaluation, **known: Any) -> Evaluation:
    """The same comparison, with these of the properties that it works out."""
    told = replace(comparison)
    vars(told).update(known)
    return told


def tables_of(comparison: Evaluation) -> list[Table]:
    return make_tables(EvaluationResult.of(comparison))


def without_bytes(samples: Iterable[Sample]) -> list[Sample]:
    """In one order, and without bytes: padding inside blocks depends on the batch."""
    return [replace(sample, bytes=0.0) for sample in sorted(samples, key=PLACE)]


def rendered(tables: Iterable[Any], width: int = 200) -> str:
    """The text of tables, without colours."""
    console = Screen(width=width, record=True, file=io.StringIO())
    for table in tables:
        console.print(to_printable(table) if isinstance(table, Table | Figure) else table)
    return console.export_text()
