"""The results of searches: what one found at one budget, and at several, and how it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, FailFast, Field

from kvsearch.core.fields import is_none
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.results.base import Result, Stored
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runs.ledger import read_lines
from kvsearch.search.trials import BestLine, ResultLine, ToldLine, TrialLog
from kvsearch.selection.scores import Scores, measure_gap_closed
from kvsearch.selection.selection import Verdict
from kvsearch.strategies.names import EVOLVED, FULL
from kvsearch.tasks.base import Coverage

if TYPE_CHECKING:
    from kvsearch.search.evolve import Choice, Evolved

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
    recovered: dict[str, Estimate | None]
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
                name: measure_gap_closed(scores, labels[EVOLVED], labels[name], seed=report.split.seed)
                for name in others
            },
            ahead=report.ahead(EVOLVED),
        )


@dataclass(frozen=True)
class Trace:
    """How a search went: every generation after so many evaluations, in order, and the best candidate of all.

    Values are what the search minimises; tokens were read under candidates, seconds are of work, in all sessions.
    """

    generations: tuple[tuple[int, ToldLine], ...]
    best: BestLine | None
    evaluations: int
    tokens: int
    seconds: float

    @property
    def words(self) -> str:
        """What it took."""
        return f"{self.evaluations} candidates, {self.tokens:,} tokens, {self.seconds:.0f} s"


class SearchResult(Result):
    """A finished search at one or several budgets: `found` says at each what was found.

    `asked` says what was asked of each split, `questions` count them. `trace` is how it went, None where its ledger is
    not at hand.
    """

    SCHEMA: ClassVar[str] = "kvsearch.evolution/3"

    model: str
    questions: dict[str, int]
    asked: dict[str, tuple[Coverage, ...]] = Field(default_factory=dict)
    evaluations: int
    tokens: int
    settings: dict[str, Any]
    found: Annotated[dict[int, FoundAtBudget], AfterValidator(lambda found: dict(sorted(found.items())))] = Field(
        min_length=1
    )
    trace: Trace | None = Field(default=None, exclude=True)

    @classmethod
    def of(cls, found: Sequence[Evolved], evaluations: int, tokens: int, decisions: Sequence[str]) -> SearchResult:
        """Return everything that a search found at every budget; its first part took so many evaluations and tokens."""
        first = found[0].search
        coverage = {name: tuple(task.coverage for task in encoded) for name, encoded in first.encoded.items()}
        questions = {name: sum(task.questions for task in asked) for name, asked in coverage.items()}
        return cls(
            model=first.base.loaded.name,
            questions={**questions, "search": len(first.samples)},
            asked=coverage,
            evaluations=evaluations,
            tokens=tokens,
            settings=first.settings.as_json(),
            found={
                evolved.search.budget: FoundAtBudget.at(evolved, decision)
                for evolved, decision in zip(found, decisions, strict=True)
            },
        )


def read_trace(path: Path) -> Trace:
    """Return how the search went whose ledger is at `path`.

    Raises:
        UsageError: a line is damaged and not only cut short.
        EnvironmentFault: it cannot be read.
    """
    keys = set[str]()
    tokens = 0
    seconds = 0.0
    best: BestLine | None = None
    generations = list[tuple[int, ToldLine]]()
    for line in read_lines(path, TrialLog.parse):
        seconds = line.at
        if isinstance(line, ResultLine):
            keys.update(line.keys)
            tokens += line.tokens
        elif isinstance(line, BestLine):
            best = line
        elif isinstance(line, ToldLine):
            generations.append((len(keys), line))
    return Trace(tuple(generations), best, len(keys), tokens, seconds)


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
