"""What a search found, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvsearch.choose.acceptance import Scores, Share, recovered
from kvsearch.report.asked import asked_words
from kvsearch.report.files.search import Finalist, FoundAtBudget, SearchResult
from kvsearch.report.numbers import chance_of, interval, percent
from kvsearch.report.selection import best_first
from kvsearch.report.table import Table
from kvsearch.search.ledger import Spent
from kvsearch.search.names import EVOLVED, EXPANDED, UNIFORM
from kvsearch.strategies.names import FULL

if TYPE_CHECKING:
    from kvsearch.evaluation.plan_comparison import PlanComparison
    from kvsearch.search.evolve import Choice, Evolved, PreparedSearch

SCHEMA, FRONT_SCHEMA = "kvsearch.evolution/1", "kvsearch.front/1"


def as_json(evolved: Evolved, spent: Spent) -> dict[str, Any]:
    """Return everything that a search found; `spent` is what its first part took."""
    search = evolved.search
    return {"schema": SCHEMA, **_origin(search, spent), "settings": search.as_json(), **_found(evolved)}


def front_as_json(found: Sequence[Evolved], spent: Spent) -> dict[str, Any]:
    """Return everything that a search at several budgets found, by budget."""
    first = found[0].search
    budgets = {str(one.budget): _found(one) for one in found}
    return {"schema": FRONT_SCHEMA, **_origin(first, spent), "settings": first.settings.as_json(), "budgets": budgets}


def _origin(search: PreparedSearch, spent: Spent) -> dict[str, Any]:
    questions = {name: sum(task.coverage.questions for task in encoded) for name, encoded in search.encoded.items()}
    questions["search"] = len(search.samples)
    return {
        "model": search.base.loaded.name,
        "questions": questions,
        "asked": {name: [asdict(task.coverage) for task in encoded] for name, encoded in search.encoded.items()},
        "evaluations": spent.evaluations,
        "tokens": spent.tokens,
    }


def _found(evolved: Evolved) -> dict[str, Any]:
    choice, report = evolved.choice, evolved.report
    return {
        "ended": evolved.outcome.ended,
        "decision": decision(evolved),
        "flat": evolved.outcome.flat,
        "starts": {name: table.tolist() for name, table in evolved.search.starts.items()},
        "finalists": {
            name: {"budgets": found.table.tolist(), "value": _number(found.value), "where": found.where,
                   "score": asdict(choice.comparison.score(name)), **_verdict(choice, name)}
            for name, found in choice.finalists.items()
        },
        "start": choice.start,
        "chosen": choice.name,
        "best": choice.best,
        "budgets": choice.table.tolist(),
        "report": {name: asdict(report.score(name)) for name in report.labels},
        "gains": {name: asdict(report.gain(EVOLVED, [name])) for name in report.labels if name not in (EVOLVED, FULL)},
        "recovered": {name: None if share is None else asdict(share) for name, share in shares(report).items()},
    }  # fmt: skip


def _verdict(choice: Choice, name: str) -> dict[str, Any]:
    """Return what a candidate leads the best start plan by, and what became of that."""
    if name not in choice.verdicts:
        return {}
    chance, is_accepted = choice.verdicts[name]
    return {"lead": asdict(choice.comparison.gain(name, [choice.start])), "chance": chance, "accepted": is_accepted}


def shares(report: PlanComparison) -> dict[str, Share | None]:
    """Return the share of the gap between each baseline and the full cache that the result closes, by baseline."""
    scores, labels = Scores.of(report.comparison.samples, report.comparison.contexts), report.labels
    seed = report.comparison.settings.seed
    return {
        name: recovered(scores, labels[EVOLVED], labels[name], seed=seed)
        for name in labels
        if name not in (EVOLVED, FULL)
    }


def tables(result: SearchResult) -> list[Table]:
    """Return the finalists on the split they were chosen by and the result on the report split, or those of a front."""
    if len(result.found) > 1:
        return [_front_table(result)]
    ((budget, found),) = result.found.items()
    ranked = sorted(found.finalists.items(), key=lambda one: (-one[1].score.mean, one[0]))
    finalists = [
        [name, one.where, "" if one.value is None else f"{one.value:.6g}", interval(one.score), *_lead_cells(one)]
        for name, one in ranked
    ]
    rows = [
        [name, interval(score), _gain(found, name), _share(found.recovered.get(name))]
        for name, score in best_first(found.report)
    ]
    return [
        Table.plain(
            f"second split: what is chosen from{_asked(result, 'choice')}",
            ["", "found", "search value", "score", f"minus {found.start}", "chance", "accepted"],
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
    rows = [["full", "", interval(first.report[FULL]), "", "", ""]]
    for budget, found in result.found.items():
        scaled = found.report.get(EXPANDED)
        rows.append(
            [
                str(budget), f"{result.total(budget):,}", interval(found.report[EVOLVED]),
                "" if scaled is None else interval(scaled), _gain(found, EXPANDED), interval(found.report[UNIFORM]),
            ]
        )  # fmt: skip
    columns = ["entries per kv head", "entries in all", "searched", "scaled from the smallest", "searched minus scaled",
               "uniform"]  # fmt: skip
    return Table.plain(f"report split, {_phases(result)}{_asked(result, 'report')}", columns, rows)


def decision(evolved: Evolved) -> str:
    """Say what was chosen and why, in one sentence."""
    choice, outcome = evolved.choice, evolved.outcome
    if outcome.flat:
        return f"{outcome.ended}; {choice.name} was written"
    score = percent(choice.comparison.score(choice.name).mean)
    found = choice.finalists[choice.name].where
    if outcome.result is not None:
        told = f"the paper's result: {choice.name} ({found}), {score} on the second split"
        above = f"; {choice.best} scores {percent(choice.comparison.score(choice.best).mean)} there"
        return told if choice.best == choice.name else told + above
    if choice.name in choice.verdicts:
        lead, chance = _led(choice, choice.name)
        ahead = f"{lead} points above the best start plan, {choice.start} (chance {chance})"
        return f"chosen: {choice.name} ({found}), {score} on the second split, {ahead}"
    kept = f"the start plan {choice.name} is kept ({score} on the second split)"
    if choice.best == choice.name:
        return f"{kept}: nothing that was found scores above it"
    lead, chance = _led(choice, choice.best)
    return f"{kept}: {choice.best} scores {lead} points above it, which may be chance ({chance})"


def _led(choice: Choice, name: str) -> tuple[str, str]:
    """Return what a finalist leads the best start plan by, and the chance of that."""
    chance, _ = choice.verdicts[name]
    return interval(choice.comparison.gain(name, [choice.start]), "+.2f"), chance_of(chance)


def _lead_cells(found: Finalist) -> tuple[str, str, str]:
    """Return what a finalist leads the best start plan by, the chance of that, and whether it was accepted."""
    if found.lead is None or found.chance is None:
        return "", "", ""
    return interval(found.lead, "+.2f"), chance_of(found.chance), "yes" if found.accepted else "no"


def _phases(result: SearchResult) -> str:
    """Return the protocol, with the phases where it is not the prompt alone that is evicted."""
    protocol, phases = (str(result.settings.get(name)) for name in ("protocol", "phases"))
    return protocol if phases == "prefill" else f"{protocol}, {'both phases' if phases == 'both' else phases}"


def _asked(result: SearchResult, split: str) -> str:
    return f", {asked_words(result.asked[split])}" if split in result.asked else ""


def _gain(found: FoundAtBudget, name: str) -> str:
    return interval(found.gains[name], "+.2f") if name in found.gains else ""


def _share(share: Share | None) -> str:
    if share is None:
        return ""
    low, high = ("-" if end is None else f"{percent(end, 0)}%" for end in (share.low, share.high))
    return f"{percent(share.mean, 0)}% ({low} to {high})"


def _number(value: float) -> float | None:
    return value if value < float("inf") else None
