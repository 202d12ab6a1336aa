"""What a search found, in words and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsearch.report.numbers import asked_words, chance_of, counted, interval, nats, percent
from kvsearch.report.selections import ahead_words, best_first, gap_bounds, lead_cells, lead_on_text, lower_words
from kvsearch.report.table import Cell, Table
from kvsearch.results.search import Finalist, FoundAtBudget, SearchResult, Trace
from kvsearch.runs.estimates import Estimate
from kvsearch.selection.scores import Scores, measure_gap_closed
from kvsearch.strategies.names import EVOLVED, EXPANDED, FULL, UNIFORM

if TYPE_CHECKING:
    from kvsearch.search.evolve import Choice, Evolved


def search_result(found: Sequence[Evolved], evaluations: int, tokens: int) -> SearchResult:
    """Return everything that a search found at one or at several budgets; its first part took so much."""
    first = found[0].search
    coverage = {name: tuple(task.coverage for task in encoded) for name, encoded in first.encoded.items()}
    questions = {name: sum(task.questions for task in asked) for name, asked in coverage.items()}
    return SearchResult(
        model=first.base.loaded.name,
        questions={**questions, "search": len(first.samples)},
        asked=coverage,
        evaluations=evaluations,
        tokens=tokens,
        settings=first.settings.as_json(),
        found={evolved.search.budget: found_at_budget(evolved) for evolved in found},
    )


def found_at_budget(evolved: Evolved) -> FoundAtBudget:
    """Return what a search found at its budget."""
    choice = evolved.choice
    report = evolved.report
    labels = report.names
    others = [name for name in labels if name not in (EVOLVED, FULL)]
    scores = Scores.of(report.samples, report.contexts)
    finalists = {}
    for name, finalist in choice.finalists.items():
        method = choice.race.method(name)
        finalists[name] = Finalist(
            budgets=finalist.table.tolist(),
            value=finalist.value if math.isfinite(finalist.value) else None,
            where=finalist.where,
            score=method.score,
            lead=method.lead,
            chance=method.chance,
        )
    return FoundAtBudget(
        ended=evolved.outcome.ended,
        decision=decision(evolved),
        flat=evolved.outcome.flat,
        starts={name: table.tolist() for name, table in evolved.search.starts.items()},
        finalists=finalists,
        start=choice.race.best,
        chosen=choice.name,
        verdict=choice.race.verdict,
        best=choice.best,
        budgets=choice.table.tolist(),
        report={name: report.score(name) for name in labels},
        gains={name: report.gain(EVOLVED, [name]) for name in others},
        recovered={
            name: measure_gap_closed(scores, labels[EVOLVED], labels[name], seed=report.split.seed) for name in others
        },
        ahead=report.find_higher_plans(EVOLVED),
    )


def parts(content: SearchResult | Trace) -> Iterator[str | Table]:
    """Yield what was chosen and why, the finalists and the report beside its baselines, and how the search went.

    Of one that is not finished there is how it goes.
    """
    if isinstance(content, SearchResult):
        yield from decisions(content)
        yield from tables(content)
    trace = content.trace if isinstance(content, SearchResult) else content
    if trace is not None:
        best = "" if trace.best is None else f"; best value {trace.best.value:.6g}, {trace.best.where}; less is better"
        yield f"convergence: {trace.words}, {counted(len(trace.generations), 'generation')}{best}"


def decisions(result: SearchResult) -> Iterator[str]:
    """Say what was chosen at each budget, and why."""
    several = len(result.found) > 1
    for budget, found in result.found.items():
        yield f"{f'{budget} entries per kv head: ' if several else ''}{found.decision or found.ended}"


def tables(result: SearchResult) -> list[Table]:
    """Return the finalists on the split they were chosen by and the result on the report split, or those of a front."""
    if len(result.found) > 1:
        return [_front_table(result)]
    ((budget, found),) = result.found.items()
    ranked = sorted(found.finalists.items(), key=lambda one: (-one[1].score.mean, one[0]))
    finalists = []
    for name, one in ranked:
        value = "" if one.value is None else Cell.number(one.value, ".6g")
        finalists.append([name, one.where, value, Cell.mean(one.score), *lead_cells(one.lead, one.chance)])
    rows = []
    for name, score in best_first(found.report):
        share = found.recovered.get(name)
        closed = "" if share is None else f"{percent(share.mean, 0)}% ({gap_bounds(share, '-')})"
        gain = _mean(found.gains, name, "+.2f")
        rows.append([name, Cell.mean(score), gain, Cell(closed, value=None if share is None else share.mean)])
    return [
        Table.plain(
            f"second split: what is chosen from{_asked(result, 'choice')}",
            ["", "found", "search value", "score", f"minus {found.start}", "chance"],
            finalists,
        ),
        Table.plain(
            f"report split, {budget} entries per kv head, {_phases(result)}{_asked(result, 'report')}",
            ["", "score", "evolved minus it", "share of its gap to full"],
            rows,
        ),
    ]


def _front_table(result: SearchResult) -> Table:
    """Return score against size on the report split: the result of each budget, and the smallest plan scaled to it."""
    first = next(iter(result.found.values()))
    rows: list[list[Any]] = [["full", Cell.mean(first.report[FULL]), "", "", ""]]
    for budget, found in result.found.items():
        scaled = _mean(found.report, EXPANDED)
        gain = _mean(found.gains, EXPANDED, "+.2f")
        rows.append([budget, _mean(found.report, EVOLVED), scaled, gain, _mean(found.report, UNIFORM)])
    columns = ["entries per kv head", "searched", "scaled from the smallest", "searched minus scaled", "uniform"]
    return Table.plain(f"report split, {_phases(result)}{_asked(result, 'report')}", columns, rows)


def decision(evolved: Evolved) -> str:
    """Say what was chosen, how sure that is, and what scores higher in the report, in one sentence."""
    ahead = ahead_words(evolved.report.find_higher_plans(EVOLVED), len(evolved.report.names) - 2)
    return f"{_choice_words(evolved)}{f'; {ahead}' if ahead else ''}"


def _choice_words(evolved: Evolved) -> str:
    choice = evolved.choice
    outcome = evolved.outcome
    if outcome.flat:
        return f"{outcome.ended}; {choice.name} was written"
    score = _scored(choice, choice.name)
    found = choice.finalists[choice.name].where
    if outcome.result is not None:
        words = f"the paper's result: {choice.name} ({found}), {score} on the second split"
        if choice.best != choice.name:
            words += f"; {choice.best} scores {_scored(choice, choice.best)} there"
        return words
    if choice.race.winner is not None:
        lead, chance = _led(choice, choice.name)
        verb = "beats" if choice.race.verdict == "beats" else "is likely better than"
        return (
            f"{choice.name} ({found}) {verb} the best start plan, {choice.race.best}: {lead}, chance "
            f"{chance}; {score} on the second split{lower_words(choice.race)}"
        )
    kept = f"the start plan {choice.name} is written ({score} on the second split)"
    if choice.best == choice.name:
        judged = counted(choice.race.count("candidate"), "found plan")
        return f"{kept}: none of {judged} that it was compared with scores above it"
    lead, chance = _led(choice, choice.best)
    return f"{kept}: {choice.best} is nearest, {lead}, chance {chance}, which is too little"


def _led(choice: Choice, name: str) -> tuple[str, str]:
    """Return what a finalist leads the best start plan by, on text in losses, and the chance of that."""
    finalist = choice.race.method(name)
    assert finalist.lead is not None
    assert finalist.chance is not None
    lead = lead_on_text(finalist) or f"{interval(finalist.lead, '+.2f')} points"
    return lead, chance_of(finalist.chance)


def _scored(choice: Choice, name: str) -> str:
    """Return what a finalist scores on the second split, on text what it loses above the full cache."""
    finalist = choice.race.method(name)
    if finalist.nats is not None:
        return f"{nats(finalist.nats.excess)} nats per token above the full cache"
    return percent(finalist.score.mean)


def _phases(result: SearchResult) -> str:
    """Return the protocol, with the phases where it is not the prompt alone that is evicted."""
    protocol, phases = (str(result.settings.get(name)) for name in ("protocol", "phases"))
    return protocol if phases == "prefill" else f"{protocol}, {'both phases' if phases == 'both' else phases}"


def _asked(result: SearchResult, split: str) -> str:
    return f", {asked_words(result.asked[split])}" if split in result.asked else ""


def _mean(estimates: Mapping[str, Estimate], name: str, form: str = ".2f") -> str | Cell:
    return Cell.mean(estimates[name], form) if name in estimates else ""
