"""A search, read again: what it found, from its report, and how it went, from its ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import FailFast, Field, model_validator

from kvsearch.choose.acceptance import Share
from kvsearch.plan.limits import MOST_ENTRIES
from kvsearch.plan.parsing import shown
from kvsearch.report.files.stored import Stored, require_fit, stored
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runs.ledger import read_lines
from kvsearch.search.ledger import SearchLedger
from kvsearch.search.names import EVOLVED, UNIFORM
from kvsearch.search.records import BestLine, ComputedLine, Line, StageLine, ToldLine
from kvsearch.strategies.names import FULL
from kvsearch.tasks.coverage import Coverage

Row = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST_ENTRIES)], ...], FailFast()]
Budgets = Annotated[tuple[Row, ...], FailFast()]  # [phases * L, Hkv]; of a damaged one the first problem will do


class Finalist(Stored):
    """A candidate or start plan that was judged by the metric; leads are over the best start plan."""

    budgets: Budgets
    value: float | None
    where: str
    score: Estimate
    lead: Difference | None = None
    chance: float | None = None
    accepted: bool | None = None


class FoundAtBudget(Stored):
    """What a search found at one budget: `report` has scores by name, `gains` what the result scores above a name."""

    ended: str
    starts: dict[str, Budgets]
    finalists: dict[str, Finalist]
    start: str
    chosen: str
    best: str
    budgets: Budgets
    report: dict[str, Estimate]
    gains: dict[str, Difference]
    recovered: dict[str, Share | None]
    decision: str = ""

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if len(set(map(len, self.budgets))) > 1:
            raise ValueError("budgets: rows are of several lengths")
        return self


class SearchResult(Stored):
    """A finished search; `found` is by budget, ascending, `asked` says what was asked of each split."""

    model: str
    questions: dict[str, int]
    asked: dict[str, tuple[Coverage, ...]] = Field(default_factory=dict)
    evaluations: int
    tokens: int
    settings: dict[str, Any]
    found: dict[int, FoundAtBudget] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        wanted = (FULL, EVOLVED, *([UNIFORM] * (len(self.found) > 1)))
        require_fit(
            f"budgets.{budget}.report: has no score of {shown(name)}"
            for budget, one in self.found.items()
            for name in wanted
            if name not in one.report
        )
        for budget, one in self.found.items():
            if not one.report.keys() - {FULL, EVOLVED}:
                raise ValueError(f"budgets.{budget}.report: nothing is beside the result")
            if not one.decision and one.chosen not in one.finalists:
                raise ValueError(f"budgets.{budget}: {shown(one.chosen)} was chosen, and is no finalist")
        return self

    def total(self, budget: int) -> int:
        """Return the entries of all kv heads, in each phase."""
        phases = 2 if self.settings.get("phases") == "both" else 1
        return int(np.sum(self.found[budget].budgets)) // phases


def read_search(data: Any, path: Path) -> SearchResult:
    """Return what a search found, at one budget or at several; UsageError if the file at `path` is damaged."""
    found = stored(_SearchFile, data, path)
    by_budget = found.budgets if isinstance(found.budgets, dict) else {found.settings.budget: data}
    whole = {**data, "found": {budget: by_budget[budget] for budget in sorted(by_budget)}}
    return stored(SearchResult, whole, path)


class _Settings(Stored):
    budget: int = 0  # of a search at one


class _SearchFile(Stored):
    settings: _Settings
    budgets: dict[int, Any] | tuple[Any, ...]  # of several budgets, or the table of one


@dataclass(frozen=True)
class Step:
    """A new best candidate of a search, which was known after so many `evaluations` and `seconds` of work."""

    evaluations: int
    seconds: float
    value: float
    where: str


@dataclass(frozen=True)
class Generation:
    """What the candidates of one generation were worth, least first, known after so many `evaluations`."""

    evaluations: int
    stage: str
    number: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """How a search went: every new best candidate, every generation, and the stages that were begun, in order.

    Values are what the search minimises; tokens were read under candidates, seconds are of work, in all sessions.
    """

    steps: tuple[Step, ...]
    generations: tuple[Generation, ...]
    stages: tuple[str, ...]
    evaluations: int
    tokens: int
    seconds: float


def read_trace(path: Path) -> Trace:
    """Return how the search went whose ledger is at `path`.

    Raises:
        UsageError: a line is damaged and not only cut short.
        EnvironmentFault: it cannot be read.
    """
    return trace_of(read_lines(path, SearchLedger.parse))


def trace_of(lines: Iterable[Line]) -> Trace:
    """Return how a search went by the lines of its ledger."""
    keys, tokens, seconds = set[str](), 0, 0.0
    steps, generations, stages = list[Step](), list[Generation](), list[str]()
    for line in lines:
        seconds = line.at
        if isinstance(line, ComputedLine):
            keys.update(line.keys)
            tokens += line.tokens
        elif isinstance(line, BestLine):
            steps.append(Step(len(keys), line.at, line.value, line.where))
        elif isinstance(line, ToldLine):
            generations.append(Generation(len(keys), line.stage, line.generation, tuple(sorted(line.values))))
        elif isinstance(line, StageLine) and line.begins:
            stages.append(line.name)
    return Trace(tuple(steps), tuple(generations), tuple(stages), len(keys), tokens, seconds)


@dataclass(frozen=True, eq=False)
class StoredSearch:
    """What a search found, None before it is finished, and how it went, None where its ledger is not at hand."""

    result: SearchResult | None
    trace: Trace | None
