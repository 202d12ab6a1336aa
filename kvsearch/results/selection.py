"""The results of selections: what one chose at one size, and at several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import Field, PlainSerializer, computed_field, model_validator

from kvsearch.core.fields import is_none
from kvsearch.plan import Size
from kvsearch.plan.schema import Protocol
from kvsearch.results.base import Result, Stored
from kvsearch.results.evaluation import HeldField
from kvsearch.runs.estimates import Difference
from kvsearch.selection.rule import Rule
from kvsearch.selection.selection import PhaseResult, Reported, Selection, TriedBudget
from kvsearch.strategies.names import FULL

DECODE_ONLY: Final = (
    "decode-only strategies hold the full cache at the end of prefill: their peak memory is that of no eviction"
)


@dataclass(frozen=True)
class PhaseOutcome(PhaseResult):
    """What was found in one phase setting; `decision` says what was decided there and why."""

    decision: str = field(kw_only=True)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def written(self) -> str:
        """The winner of the phase setting, or else its best baseline."""
        return super().written


@dataclass(frozen=True)
class ReportSplit(Reported):
    """What the report split says; `words` say it in a sentence.

    `baseline` is the best one, `uniform` the strategy with equal budgets that is in every report.
    """

    held: dict[str, HeldField]
    baseline: str = field(kw_only=True)
    uniform: str = field(kw_only=True)
    words: str = field(kw_only=True)


class WrittenPlan(Stored):
    """The plan that was written: a strategy, or else the best baseline (`fallback`); `total` counts its entries."""

    phases: str
    name: str
    fallback: bool
    total: int


class SelectionResult(Result):
    """What was chosen at one size, what it was compared with, and its score on held-out questions.

    `plan` is the file of what was chosen, where the record is not beside it.
    """

    SCHEMA: ClassVar[str] = "kvsearch.selection/2"

    model: str
    budget: int | None = Field(default=None, exclude_if=is_none)
    ratio: float | None = Field(default=None, exclude_if=is_none)
    protocol: Protocol
    seed: int
    rule: Rule
    outcomes: tuple[PhaseOutcome, ...]
    written: WrittenPlan
    report: ReportSplit
    notes: tuple[str, ...] = ()
    plan: str | None = Field(default=None, exclude_if=is_none)

    @classmethod
    def of(cls, selection: Selection, decisions: Sequence[str], reported: str, **more: Any) -> Self:
        """Return everything that a selection found, and `more` fields of a result that has some.

        `decisions` say what was decided in each phase setting, `reported` what the report split says of the choice.
        """
        chosen = selection.chosen
        report = selection.report
        outcomes = tuple(
            PhaseOutcome(**vars(result), decision=decision)
            for result, decision in zip(selection.results, decisions, strict=True)
        )
        written = WrittenPlan(
            phases=chosen.phases, name=chosen.written, fallback=chosen.winner is None, total=selection.plan.total
        )
        notes = [note for result in selection.results for note in result.notes] + list(report.notes)
        if any(result.phases == "decode" for result in selection.results):
            notes.append(DECODE_ONLY)
        return cls(
            model=selection.model,
            budget=selection.size.budget,
            ratio=selection.size.ratio,
            protocol=selection.protocol,
            seed=selection.seed,
            rule=selection.rule,
            outcomes=outcomes,
            written=written,
            report=ReportSplit(**vars(report), baseline=chosen.best, uniform=selection.even, words=reported),
            notes=tuple(dict.fromkeys(notes)),
            **more,
        )

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        Size(self.budget, self.ratio)
        return self

    @cached_property
    def size(self) -> Size:
        """The size that was chosen at."""
        return Size(self.budget, self.ratio)

    @property
    def chosen(self) -> PhaseOutcome:
        """What was found in the phase setting that was chosen."""
        return {outcome.phases: outcome for outcome in self.outcomes}[self.written.phases]

    @property
    def kept_share(self) -> float:
        """What the written plan keeps of the entries of the full cache."""
        return self.report.held[self.chosen.written].entries / self.report.held[FULL].entries

    @property
    def choices(self) -> Sequence[SelectionResult]:
        """Itself: it is of one size."""
        return (self,)


class SelectionsResult(Result):
    """What was chosen at several budgets of one profile, by budget."""

    SCHEMA: ClassVar[str] = "kvsearch.selections/2"

    budgets: dict[str, Annotated[SelectionResult, PlainSerializer(SelectionResult.as_json)]] = Field(min_length=1)

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.choices[0].model

    @property
    def choices(self) -> Sequence[SelectionResult]:
        """What was chosen at each size, smaller ones first."""
        return smallest_first(self.budgets.values())


Chosen = TypeVar("Chosen", bound=SelectionResult)


def smallest_first(selections: Iterable[Chosen]) -> list[Chosen]:
    """Return selections by what is kept: by budget, or by the share that is not evicted."""
    return sorted(selections, key=lambda selection: selection.size.budget or 1 - (selection.size.ratio or 0))


class RunChoice(SelectionResult):
    """The selection at one size, what its plan loses to the full cache on the report split, and all in words."""

    loss: Difference
    plan: str
    words: tuple[str, ...] = ()


class RunResult(Result):
    """A finished run, and the budgets that it tried where it had to find one."""

    SCHEMA: ClassVar[str] = "kvsearch.run-report/2"

    sizes: dict[str, Annotated[RunChoice, PlainSerializer(RunChoice.as_json)]] = Field(min_length=1)
    tried: tuple[TriedBudget, ...] = Field(default=(), exclude_if=lambda tried: not tried)

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.choices[0].model

    @property
    def choices(self) -> list[RunChoice]:
        """What was chosen at each size, smaller ones first."""
        return smallest_first(self.sizes.values())
