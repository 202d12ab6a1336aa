"""The lines of a search ledger: what was asked, measured, told and found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from kvsearch.arrays import Floats, Ints, Vector
from kvsearch.plan.fields import Floor, Index, Record, Sha256, Text, refuse
from kvsearch.search.jobs import JobOutcome, Result, results_of
from kvsearch.workers.base import OutcomeKind

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Number = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(lambda value: _SPECIAL.get(value, value) if isinstance(value, str) else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else str(value)),
]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Point = list[Finite]


class Line(Record):
    """What all lines have: `at`, the seconds of work on the run before it was written."""

    at: Seconds


class GenerationLine(Line):
    """Points of one generation of a stage."""

    stage: Text
    generation: Index
    points: list[Point]

    @property
    def vectors(self) -> list[Vector]:
        """The points [d] each, bit for bit."""
        return [np.array(point, dtype=np.float64) for point in self.points]


class AskedLine(GenerationLine):
    """The points as the optimiser asked for them."""


class ToldLine(GenerationLine):
    """The points as the optimiser was told them, with their values, which it minimises."""

    values: list[Finite]

    @model_validator(mode="after")
    def _one_value_each(self) -> ToldLine:
        if len(self.values) != len(self.points):
            refuse([(("values",), f"has {len(self.values)} for {len(self.points)} points")])
        return self


class ComputedLine(Line):
    """Candidates, by `candidate_key`, that were measured together, and what became of them, see `JobOutcome`."""

    keys: list[Sha256] = Field(min_length=1)
    outcome: OutcomeKind
    values: list[list[Number]] | None = None
    message: str = ""
    seconds: Seconds
    tokens: Index

    @model_validator(mode="after")
    def _a_row_each(self) -> ComputedLine:
        if self.values is not None and len(self.values) != len(self.keys):
            refuse([(("values",), f"has {len(self.values)} rows for {len(self.keys)} candidates")])
        refuse(_ragged("values", self.values or []))
        return self

    @cached_property
    def results(self) -> Mapping[str, Result]:
        """What became of each candidate, by its key."""
        values: Floats | None = None if self.values is None else np.array(self.values, dtype=np.float64)
        whole = JobOutcome(0, self.outcome, values, self.message, self.seconds, self.tokens)
        return dict(zip(self.keys, results_of(whole, len(self.keys)), strict=True))


class BestLine(Line):
    """The best candidate so far: budgets [L, Hkv], its value, and where it was found."""

    candidate: list[list[Floor]] = Field(min_length=1)
    value: Finite
    where: Text

    @model_validator(mode="after")
    def _a_table(self) -> BestLine:
        refuse(_ragged("candidate", self.candidate))
        return self

    @property
    def table(self) -> Ints:
        """The candidate as an array."""
        return np.array(self.candidate, dtype=np.int64)


class StageLine(Line):
    """The begin or the end of a group of layers or another phase, with what it is about."""

    name: Text
    begins: bool
    settings: dict[str, Any] = Field(default_factory=dict)


def _ragged(name: str, rows: Sequence[Sequence[object]]) -> Iterator[tuple[tuple[str], str]]:
    """Find rows of different lengths: they are no table."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        yield (name,), f"has rows of {lengths[0]} to {lengths[-1]} items: they must be alike"


LINES: dict[str, type[Line]] = {
    "asked": AskedLine,
    "result": ComputedLine,
    "told": ToldLine,
    "best": BestLine,
    "stage": StageLine,
}
