"""Sentences and tables about the result of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsearch.core.printed import pluralize
from kvsearch.evaluation.names import EVOLVED, EXPANDED, FULL, UNIFORM
from kvsearch.report.selections import (
    IS_BETTER,
    describe_higher_plans,
    describe_lower_tasks,
    find_lead_on_text,
    format_gap_bounds,
    make_lead_cells,
    sort_best_first,
)
from kvsearch.report.table import (
    Cell,
    Table,
    describe_coverage,
    format_chance,
    format_interval,
    format_nats,
    format_percent,
)
from kvsearch.results.search import Finalist, FoundAtBudget, SearchResult, Trace
from kvsearch.runs.estimates import Estimate
from kvsearch.selection.scores import Scores, measure_gap_closed

if TYPE_CHECKING:
    from kvsearch.search.evolve import Choice, Evolved


def make_search_result(results: Sequence[Evolved], evaluations: int, tokens: int) -> SearchResult:
    """Return everything that a search found at one or at several budgets; its first part took so much."""
    first = results[0].search
    coverage = {name: tuple(task.coverage for task in encoded) for name, encoded in first.encoded.items()}
    questions = {name: sum(task.questions for task in tasks) for name, tasks in coverage.items()}
    return SearchResult(
        model=first.setup.loaded.name,
        questions={**questions, "search": len(first.samples)},
        asked=coverage,
        evaluations=evaluations,
        tokens=tokens,
        settings=first.settings.as_json(),
        found={evolved.search.budget: make_budget_result(evolved) for evolved in results},
    )


def make_budget_result(evolved: Evolved) -> FoundAtBudget:
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
        decision=describe_decision(evolved),
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


def list_parts(content: SearchResult | Trace) -> Iterator[str | Table]:
    """Yield what was chosen and why, the finalists and the report beside its baselines, and how the search went.

    Of one that is not finished there is how it goes.
    """
    if isinstance(content, SearchResult):
        yield from describe_decisions(content)
        yield from make_tables(content)
    trace = content.trace if isinstance(content, SearchResult) else content
    if trace is not None:
        best = "" if trace.best is None else f"; best value {trace.best.value:.6g}, {trace.best.where}; less is better"
        yield f"convergence: {trace.words}, {pluralize(len(trace.generations), 'generation')}{best}"


def describe_decisions(result: SearchResult) -> Iterator[str]:
    """Say what was chosen at each budget, and why."""
    several = len(result.found) > 1
    for budget, at_budget in result.found.items():
        yield f"{f'{budget} entries per kv head: ' if several else ''}{at_budget.decision}"


def make_tables(result: SearchResult) -> list[Table]:
    """Make the tables of a search: finalists on the selection split and the result on the report split, or a front."""
    if len(result.found) > 1:
        return [_make_front_table(result)]
    ((budget, at_budget),) = result.found.items()
    ranked = sorted(at_budget.finalists.items(), key=lambda finalist: (-finalist[1].score.mean, finalist[0]))
    finalists = []
    for name, finalist in ranked:
        value = "" if finalist.value is None else Cell.number(finalist.value, ".6g")
        finalists.append(
            [name, finalist.where, value, Cell.mean(finalist.score), *make_lead_cells(finalist.lead, finalist.chance)]
        )
    rows = []
    for name, score in sort_best_first(at_budget.report):
        share = at_budget.recovered.get(name)
        closed = "" if share is None else f"{format_percent(share.mean, 0)}% ({format_gap_bounds(share, '-')})"
        gain = _format_mean(at_budget.gains, name, "+.2f")
        rows.append([name, Cell.mean(score), gain, Cell(closed, value=None if share is None else share.mean)])
    return [
        Table.plain(
            f"second split: what is chosen from, {describe_coverage(result.asked['choice'])}",
            ["", "found", "search value", "score", f"minus {at_budget.start}", "chance"],
            finalists,
        ),
        Table.plain(
            f"report split, {budget} entries per kv head, "
            f"{_describe_phases(result)}, {describe_coverage(result.asked['report'])}",
            ["", "score", "evolved minus it", "share of its gap to full"],
            rows,
        ),
    ]


def _make_front_table(result: SearchResult) -> Table:
    """Return score against size on the report split: the result of each budget, and the smallest plan scaled to it."""
    first = next(iter(result.found.values()))
    rows: list[list[Any]] = [["full", Cell.mean(first.report[FULL]), "", "", ""]]
    for budget, at_budget in result.found.items():
        scaled = _format_mean(at_budget.report, EXPANDED)
        gain = _format_mean(at_budget.gains, EXPANDED, "+.2f")
        rows.append(
            [budget, _format_mean(at_budget.report, EVOLVED), scaled, gain, _format_mean(at_budget.report, UNIFORM)]
        )
    columns = ["entries per kv head", "searched", "scaled from the smallest", "searched minus scaled", "uniform"]
    return Table.plain(
        f"report split, {_describe_phases(result)}, {describe_coverage(result.asked['report'])}", columns, rows
    )


def describe_decision(evolved: Evolved) -> str:
    """Say what was chosen, how sure that is, and what scores higher in the report, in one sentence."""
    ahead = describe_higher_plans(evolved.report.find_higher_plans(EVOLVED), len(evolved.report.names) - 2)
    return f"{_describe_choice(evolved)}{f'; {ahead}' if ahead else ''}"


def _describe_choice(evolved: Evolved) -> str:
    choice = evolved.choice
    outcome = evolved.outcome
    if outcome.flat:
        return f"{outcome.ended}; {choice.name} was written"
    score = _describe_score(choice, choice.name)
    where = choice.finalists[choice.name].where
    if outcome.result is not None:
        text = f"the paper's result: {choice.name} ({where}), {score} on the second split"
        if choice.best != choice.name:
            text += f"; {choice.best} scores {_describe_score(choice, choice.best)} there"
        return text
    if choice.race.winner is not None:
        lead, chance = _describe_lead(choice, choice.name)
        verb = IS_BETTER[choice.race.verdict]
        return (
            f"{choice.name} ({where}) {verb} the best start plan, {choice.race.best}: {lead}, chance "
            f"{chance}; {score} on the second split{describe_lower_tasks(choice.race)}"
        )
    kept = f"the start plan {choice.name} is written ({score} on the second split)"
    if choice.best == choice.name:
        judged = pluralize(choice.race.count("candidate"), "found plan")
        return f"{kept}: none of {judged} that it was compared with scores above it"
    lead, chance = _describe_lead(choice, choice.best)
    return f"{kept}: {choice.best} is nearest, {lead}, chance {chance}, which is too little"


def _describe_lead(choice: Choice, name: str) -> tuple[str, str]:
    """Return what a finalist leads the best start plan by, on text in losses, and the chance of that."""
    finalist = choice.race.method(name)
    assert finalist.lead is not None
    assert finalist.chance is not None
    lead = find_lead_on_text(finalist) or f"{format_interval(finalist.lead, '+.2f')} points"
    return lead, format_chance(finalist.chance)


def _describe_score(choice: Choice, name: str) -> str:
    """Return what a finalist scores on the second split, on text what it loses above the full cache."""
    finalist = choice.race.method(name)
    if finalist.nats is not None:
        return f"{format_nats(finalist.nats.excess)} nats per token above the full cache"
    return format_percent(finalist.score.mean)


def _describe_phases(result: SearchResult) -> str:
    """Return the protocol, with the phases where it is not the prompt alone that is evicted."""
    protocol, phases = (str(result.settings[name]) for name in ("protocol", "phases"))
    return protocol if phases == "prefill" else f"{protocol}, {'both phases' if phases == 'both' else phases}"


def _format_mean(estimates: Mapping[str, Estimate], name: str, form: str = ".2f") -> str | Cell:
    return Cell.mean(estimates[name], form) if name in estimates else ""
