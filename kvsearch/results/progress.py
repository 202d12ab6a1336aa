"""How far a search is, from its ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvsearch.results.search import AnySearch
from kvsearch.runs.ledger import read_lines
from kvsearch.search.trials import BestLine, ResultLine, ToldLine, TrialLog


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
