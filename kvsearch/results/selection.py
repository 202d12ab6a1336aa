"""The results of selections: what one chose at one size, and at several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Self

from pydantic import Field, PlainSerializer, model_validator

from kvsearch.core.fields import is_none
from kvsearch.evaluation.names import FULL
from kvsearch.plan import Size
from kvsearch.plan.schema import Protocol
from kvsearch.results import Result
from kvsearch.runs.estimates import Difference
from kvsearch.selection.records import PhaseResult, ReportScores, Rule, TriedBudget


class SelectionResult(Result):
    """What was chosen at one size, what it was compared with, and its score on held-out questions.

    `decision` says what was `chosen` and why, `reported` what the report split says of that, and `loss` what the plan
    loses to the full cache there. `uniform` is the strategy with equal budgets that is in every report, `total` counts
    the entries of the written plan; `plan` is its file, where the record is not beside it.
    """

    SCHEMA: ClassVar[str] = "kvsearch.selection/4"

    model: str
    budget: int | None = Field(default=None, exclude_if=is_none)
    ratio: float | None = Field(default=None, exclude_if=is_none)
    protocol: Protocol
    seed: int
    rule: Rule
    chosen: PhaseResult
    decision: str
    total: int
    uniform: str
    report: ReportScores
    reported: str
    notes: tuple[str, ...] = ()
    loss: Difference
    plan: str | None = Field(default=None, exclude_if=is_none)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        Size(self.budget, self.ratio)
        if not {self.chosen.best, self.chosen.written} <= {method.name for method in self.chosen.methods}:
            raise ValueError("what was chosen is of methods that were not compared")
        return self

    @cached_property
    def size(self) -> Size:
        """The size that was chosen at."""
        return Size(self.budget, self.ratio)

    @property
    def kept_share(self) -> float:
        """What the written plan keeps of the entries of the full cache."""
        return self.report.held[self.chosen.written].entries / self.report.held[FULL].entries

    @property
    def choices(self) -> Sequence[SelectionResult]:
        """Itself: it is of one size."""
        return (self,)


class SelectionsResult(Result):
    """What was chosen at several budgets of one profile, by size."""

    SCHEMA: ClassVar[str] = "kvsearch.selections/4"

    sizes: dict[str, Annotated[SelectionResult, PlainSerializer(SelectionResult.as_json)]] = Field(min_length=1)

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.choices[0].model

    @property
    def choices(self) -> Sequence[SelectionResult]:
        """What was chosen at each size, by what is kept: by budget, or by the share that is not evicted."""
        return sorted(self.sizes.values(), key=lambda chosen: chosen.size.budget or 1 - (chosen.size.ratio or 0))


class RunResult(SelectionsResult):
    """A finished run, and the budgets that it tried where it had to find one."""

    SCHEMA: ClassVar[str] = "kvsearch.run-report/4"

    tried: tuple[TriedBudget, ...] = Field(default=(), exclude_if=lambda tried: not tried)
