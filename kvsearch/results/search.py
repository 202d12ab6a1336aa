"""The results of searches: what one found at one budget, and at several, and how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import FailFast, Field

from kvsearch.core.fields import is_none
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.results.base import Result, Stored, read_content
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runs.ledger import read_lines
from kvsearch.search.trials import BestLine, ResultLine, Spent, ToldLine, TrialLog
from kvsearch.selection.rule import Verdict
from kvsearch.selection.scores import GapClosed, Scores, measure_gap_closed
from kvsearch.strategies.names import EVOLVED, FULL
from kvsearch.tasks.base import Coverage

if TYPE_CHECKING:
    from kvsearch.search.evolve import Choice, Evolved, PreparedSearch

Row = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST_ENTRIES)], ...], FailFast()]
Budgets = Annotated[tuple[Row, ...], FailFast()]  # [phases * L, Hkv]; of a damaged one the first problem will do


class Finalist(Stored):
    """A candidate or start plan that was judged by the metric; leads are over the best start plan."""

    budgets: Budgets
    value: float | None
    where: str
    score: Estimate
    lead: Difference | None = Field(default=None, exclude_if=is_none)
    chance: float | None = Field(default=None, exclude_if=is_none)


class FoundAtBudget(Stored):
    """What a search found at one budget: `report` has scores by name, `gains` what the result scores above a name.

    `ahead` are those of the report that score higher than the result, with what they score above it.
    """

    ended: str
    decision: str = ""
    flat: bool = False
    starts: dict[str, Budgets]
    finalists: dict[str, Finalist]
    start: str
    chosen: str
    verdict: Verdict
    best: str
    budgets: Budgets
    report: dict[str, Estimate]
    gains: dict[str, Difference]
    recovered: dict[str, GapClosed | None]
    ahead: dict[str, Difference]

    @classmethod
    def at(cls, evolved: Evolved, decision: str) -> FoundAtBudget:
        """Return what was found; `decision` says what was chosen and why."""
        choice = evolved.choice
        report = evolved.report
        labels = report.names
        others = [name for name in labels if name not in (EVOLVED, FULL)]
        scores = Scores.of(report.samples, report.contexts)
        return FoundAtBudget(
            ended=evolved.outcome.ended,
            decision=decision,
            flat=evolved.outcome.flat,
            starts={name: table.tolist() for name, table in evolved.search.starts.items()},
            finalists={name: _finalist(choice, name) for name in choice.finalists},
            start=choice.race.best,
            chosen=choice.name,
            verdict=choice.race.verdict,
            best=choice.best,
            budgets=choice.table.tolist(),
            report={name: report.score(name) for name in labels},
            gains={name: report.gain(EVOLVED, [name]) for name in others},
            recovered={
                name: measure_gap_closed(scores, labels[EVOLVED], labels[name], seed=report.settings.seed)
                for name in others
            },
            ahead=report.ahead(EVOLVED),
        )


class SearchOrigin(Result):
    """What a search was asked: `asked` says it of each split, `questions` count them."""

    model: str
    questions: dict[str, int]
    asked: dict[str, tuple[Coverage, ...]] = Field(default_factory=dict)
    evaluations: int
    tokens: int
    settings: dict[str, Any]


class SearchResult(FoundAtBudget, SearchOrigin):
    """A finished search at one budget."""

    SCHEMA: ClassVar[str] = "kvsearch.evolution/2"

    @classmethod
    def of(cls, evolved: Evolved, spent: Spent, decision: str) -> SearchResult:
        """Return everything that a search found; `spent` is what its first part took."""
        found = dict(FoundAtBudget.at(evolved, decision))
        return SearchResult(**_origin(evolved.search, spent), settings=evolved.search.as_json(), **found)

    @property
    def found(self) -> Mapping[int, FoundAtBudget]:
        """What was found, by budget."""
        return {self.settings.get("budget", 0): self}


class FrontResult(SearchOrigin):
    """A finished search at several budgets."""

    SCHEMA: ClassVar[str] = "kvsearch.front/2"

    budgets: dict[int, FoundAtBudget] = Field(min_length=1)

    @classmethod
    def of(cls, found: Sequence[Evolved], spent: Spent, decisions: Sequence[str]) -> FrontResult:
        """Return everything that a search found at every budget; `spent` is what its first part took."""
        first = found[0].search
        budgets = {one.budget: FoundAtBudget.at(one, decision) for one, decision in zip(found, decisions, strict=True)}
        return cls(**_origin(first, spent), settings=first.settings.as_json(), budgets=budgets)

    @property
    def found(self) -> Mapping[int, FoundAtBudget]:
        """What was found, by budget, ascending."""
        return dict(sorted(self.budgets.items()))


AnySearch = SearchResult | FrontResult


def read_search(data: Any, path: Path) -> AnySearch:
    """Return what a search found, at one budget or at several; UsageError if the file at `path` is damaged."""
    several = isinstance(data, dict) and isinstance(data.get("budgets"), dict)
    return read_content(FrontResult, data, path) if several else read_content(SearchResult, data, path)


@dataclass(frozen=True)
class Trace:
    """How a search went: every new best candidate and every generation, each after so many evaluations, in order.

    Values are what the search minimises; tokens were read under candidates, seconds are of work, in all sessions.
    """

    steps: tuple[tuple[int, BestLine], ...]
    generations: tuple[tuple[int, ToldLine], ...]
    evaluations: int
    tokens: int
    seconds: float


def read_trace(path: Path) -> Trace:
    """Return how the search went whose ledger is at `path`.

    Raises:
        UsageError: a line is damaged and not only cut short.
        EnvironmentFault: it cannot be read.
    """
    keys = set[str]()
    tokens = 0
    seconds = 0.0
    steps = list[tuple[int, BestLine]]()
    generations = list[tuple[int, ToldLine]]()
    for line in read_lines(path, TrialLog.parse):
        seconds = line.at
        if isinstance(line, ResultLine):
            keys.update(line.keys)
            tokens += line.tokens
        elif isinstance(line, BestLine):
            steps.append((len(keys), line))
        elif isinstance(line, ToldLine):
            generations.append((len(keys), line))
    return Trace(tuple(steps), tuple(generations), len(keys), tokens, seconds)


@dataclass(frozen=True, eq=False)
class StoredSearch:
    """What a search found, None before it is finished, and how it went, None where its ledger is not at hand."""

    result: AnySearch | None
    trace: Trace | None


def _origin(search: PreparedSearch, spent: Spent) -> dict[str, Any]:
    questions = {name: sum(task.coverage.questions for task in encoded) for name, encoded in search.encoded.items()}
    questions["search"] = len(search.samples)
    asked = {name: tuple(task.coverage for task in encoded) for name, encoded in search.encoded.items()}
    return {
        "model": search.base.loaded.name, "questions": questions, "asked": asked, "evaluations": spent.evaluations,
        "tokens": spent.tokens,
    }  # fmt: skip


def _finalist(choice: Choice, name: str) -> Finalist:
    """Return a finalist with what it leads the best start plan by, where it was compared with that."""
    found = choice.finalists[name]
    method = choice.race.method(name)
    value = found.value if found.value < float("inf") else None
    return Finalist(
        budgets=found.table.tolist(),
        value=value,
        where=found.where,
        score=method.score,
        lead=method.lead,
        chance=method.chance,
    )
