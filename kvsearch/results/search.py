"""The results of searches: what one found at one budget, and at several, and how it went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, FailFast, Field

from kvsearch.core.fields import is_none
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.results import Result, Stored
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runs.ledger import read_lines
from kvsearch.search.trials import BestRecord, GenerationRecord, JobRecord, TrialLog
from kvsearch.selection.records import RaceVerdict
from kvsearch.tasks.base import Coverage

BudgetRow = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST_ENTRIES)], ...], FailFast()]
SearchedBudgets = Annotated[
    tuple[BudgetRow, ...], FailFast()
]  # [phases * L, Hkv]; of a damaged one the first problem will do


class Finalist(Stored):
    """A candidate or start plan that was judged by the metric; leads are over the best start plan."""

    budgets: SearchedBudgets
    value: float | None
    where: str
    score: Estimate
    lead: Difference | None = Field(default=None, exclude_if=is_none)
    chance: float | None = Field(default=None, exclude_if=is_none)


class FoundAtBudget(Stored):
    """What a search found at one budget: `report` has scores by name, `gains` what the result scores above a name.

    `ahead` are the plans of the report that score higher than the result, with what they score above it.
    """

    ended: str
    decision: str
    flat: bool
    starts: dict[str, SearchedBudgets]
    finalists: dict[str, Finalist]
    start: str
    chosen: str
    verdict: RaceVerdict
    best: str
    budgets: SearchedBudgets
    report: dict[str, Estimate]
    gains: dict[str, Difference]
    recovered: dict[str, Estimate | None]
    ahead: dict[str, Difference]


@dataclass(frozen=True)
class Trace:
    """How a search went: every generation after so many evaluations, in order, and the best candidate of all.

    Values are what the search minimises; tokens were read under candidates, seconds are of work, in all sessions.
    """

    generations: tuple[tuple[int, GenerationRecord], ...]
    best: BestRecord | None
    evaluations: int
    tokens: int
    seconds: float

    @property
    def words(self) -> str:
        """What it took."""
        return f"{self.evaluations} candidates, {self.tokens:,} tokens, {self.seconds:.0f} s"


class SearchResult(Result):
    """A finished search at one or several budgets: `found` says at each what was found.

    `asked` says which contexts and questions of each split were asked, `questions` counts them. `trace` is how it went,
    None where its ledger is not at hand.
    """

    SCHEMA: ClassVar[str] = "kvsearch.evolution/3"

    model: str
    questions: dict[str, int]
    asked: dict[str, tuple[Coverage, ...]]
    evaluations: int
    tokens: int
    settings: dict[str, Any]
    found: Annotated[dict[int, FoundAtBudget], AfterValidator(lambda results: dict(sorted(results.items())))] = Field(
        min_length=1
    )
    trace: Trace | None = Field(default=None, exclude=True)


def read_trace(path: Path) -> Trace:
    """Return how the search went whose ledger is at `path`.

    Raises:
        UsageError: a line is damaged and not only cut short.
        EnvironmentFault: it cannot be read.
    """
    keys = set[str]()
    tokens = 0
    seconds = 0.0
    best: BestRecord | None = None
    generations = list[tuple[int, GenerationRecord]]()
    for line in read_lines(path, TrialLog.parse):
        seconds = line.at
        if isinstance(line, JobRecord):
            keys.update(line.keys)
            tokens += line.tokens
        elif isinstance(line, BestRecord):
            best = line
        elif isinstance(line, GenerationRecord):
            generations.append((len(keys), line))
    return Trace(tuple(generations), best, len(keys), tokens, seconds)
