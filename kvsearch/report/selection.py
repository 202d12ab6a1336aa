"""What a selection found: as JSON, the decision in words, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvsearch.choose.acceptance import Rule
from kvsearch.choose.decomposition import BUDGETS_ALONE, POLICIES_ALONE
from kvsearch.choose.selection import MethodResult, PhaseResult, QuestionCount, Reported, Selection, SelectionResult
from kvsearch.report.asked import about
from kvsearch.report.numbers import chance_of, counted, interval, outcomes, percent
from kvsearch.report.table import Cell, RowGroup, Table
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import FULL

SCHEMA, SEVERAL, FILE = "kvsearch.selection/1", "kvsearch.selections/1", "selection.json"
SHOWN = 10  # rows of the table of a first stage
DECODE_ONLY = (
    "decode-only strategies hold the full cache at the end of prefill: their peak memory is that of no eviction"
)


def as_json(selection: Selection) -> dict[str, Any]:
    """Return everything; scores are in [0, 1]."""

    def result_json(result: PhaseResult) -> dict[str, Any]:
        fields = asdict(result)
        standings = fields.pop("methods")
        return {**fields, "standings": standings, "written": result.written, "decision": decision(result)}

    chosen, report = selection.chosen, selection.report
    held = {name: found._asdict() for name, found in report.held.items()}
    return {
        "schema": SCHEMA, "model": selection.model, **selection.size.as_json(), "protocol": selection.protocol,
        "seed": selection.seed, "rule": asdict(selection.rule), "outcomes": list(map(result_json, selection.results)),
        "written": {
            "phases": chosen.phases, "name": chosen.written, "fallback": chosen.winner is None,
            "total": selection.plan.total,
        },
        "report": {
            **asdict(report), "held": held, "baseline": chosen.best, "uniform": selection.even, "words": gap(selection),
        },
        "notes": notes(selection),
    }  # fmt: skip


def decision(result: PhaseResult) -> str:
    """Say what was decided for one phase setting and why, in one sentence."""
    baselines, finalists, leader = counted(result.count("baseline"), "baseline"), result.finalists, result.leader
    if leader is None:
        return (
            f"fallback to {result.best}, the best of {baselines} on all questions: there is no candidate, every "
            "strategy is a baseline, too"
        )
    found = "nothing"
    if leader.lead is not None and leader.chance is not None:
        found = f"{_points(leader)}, chance {chance_of(leader.chance)} over {counted(len(finalists), 'finalist')}"
        if result.margin is None and result.level < Rule.level:  # several phases or sizes share it
            found += f", where {result.level:.2g} or less counts"
    fresh = f"{counted(result.second.questions, 'fresh question')} about {counted(result.second.contexts, 'context')}"
    how = "beyond doubt" if result.margin is None else f"by more than {100 * result.margin:g} points"
    if result.winner:
        return f"{result.winner} beats {result.best}, the best of {baselines}, {how} on {fresh}: {found}"
    hopeless = result.margin is None and 0.5**result.second.contexts > result.level
    few = "; so few contexts cannot show any lead, ask more" if hopeless else ""
    candidates = counted(result.count("candidate"), "candidate")
    tried = f"none of {counted(len(finalists), 'finalist')} out of {candidates}"
    return (
        f"fallback to {result.best}, the best of {baselines}: {tried} beats it {how} on {fresh}; the nearest is "
        f"{leader.name}, {found}{few}"
    )


def gap(selection: SelectionResult) -> str:
    """Say what the report split says of the choice, in one sentence."""
    report, best = selection.report, selection.chosen.best
    fresh = f"{asked(report.asked)} of the report split"
    if report.gain is None:
        return f"on {fresh} {best} scores {percent(report.scores[best].mean)}"
    share = "no gap: the full cache is not above the best baseline"
    if report.share is not None:
        ends = (report.share.low, report.share.high)
        within = " to ".join("unbounded" if end is None else f"{percent(end, 0)}%" for end in ends)
        share = f"{percent(report.share.mean, 0)}% of the gap to the full cache is recovered (95% interval {within})"
    lead = interval(report.gain, "+.2f", noun=" points")
    return f"{selection.chosen.winner} minus {best} on {fresh}: {lead}; {share}"


def notes(selection: SelectionResult) -> list[str]:
    """Return what is not as it was asked, or not of equal size, each once."""
    said = [note for result in selection.results for note in result.notes] + list(selection.report.notes)
    if any(result.phases == "decode" for result in selection.results):
        said.append(DECODE_ONLY)
    return list(dict.fromkeys(said))


def tables(*selections: SelectionResult) -> list[Table]:
    """Return both stages and the report of every selection, then what all report on the candidates, by size.

    The selections are of one profile at several sizes, whose reports ask the same questions.
    """
    found = [table for one in selections for table in stage_tables(one)]
    leading = [one for one in selections if one.chosen.leader is not None]
    return [*found, *([_top_table(leading), _budget_table(leading), _part_table(leading)] if leading else [])]


def stage_tables(selection: SelectionResult) -> list[Table]:
    """Return both stages of every phase setting, and the report."""
    stages = [table for result in selection.results for table in _stages(selection, result)]
    return [*stages, report_table(selection)]


def _top_table(selections: Sequence[SelectionResult]) -> Table:
    """Return the leader against the best baseline at every size (PolyKV, Table 1)."""
    rows = []
    for one in selections:
        report, chosen, leader = one.report, one.chosen, one.chosen.leader
        scores = [report.scores[found.name].mean for found in chosen.finalists]
        if leader is not None and report.lead is not None:
            rows.append([
                one.size.words, percent(report.scores[FULL].mean), _named(report, chosen.best),
                _named(report, leader.name), f"{percent(min(scores))} to {percent(max(scores))}",
                interval(report.lead, "+.2f"),
            ])  # fmt: skip
    header = ["", "full", "best baseline", "top 1", "finalists", "top 1 minus the best baseline"]
    note = "top 1: the accepted candidate, or else the finalist with the highest score in the second stage"
    return Table.plain(f"report split: the best candidates ({_where(selections[0])})", header, rows, (note,))


def _budget_table(selections: Sequence[SelectionResult]) -> Table:
    """Return the best candidates with equal budgets and with budgets of their own at every size (PolyKV, Table 2)."""
    rows = []
    for one in selections:
        report, found = one.report, one.report.by_budgets
        if found is not None:
            rows.append([
                one.size.words, _named(report, one.chosen.best), _named(report, found.equal), _named(report, found.own),
                "" if found.gain is None else interval(found.gain, "+.2f"),
            ])  # fmt: skip
    header = ["", "best baseline", "equal budgets", "own budgets", "own minus equal"]
    note = "the best candidate of either kind: by the second stage if one of the kind is a finalist, else by the first"
    return Table.plain(f"report split: what budgets bring ({_where(selections[0])})", header, rows, (note,))


def _part_table(selections: Sequence[SelectionResult]) -> Table:
    """Return what the leader gains by its policies and what by its budgets at every size."""
    groups = []
    for one in selections:
        if (parts := one.report.parts) is not None:
            rows = [
                ["policies", interval(parts.policies.alone, "+.2f"), interval(parts.policies.beside, "+.2f")],
                ["budgets", interval(parts.budgets.alone, "+.2f"), interval(parts.budgets.beside, "+.2f")],
                ["both", interval(parts.both, "+.2f"), ""],
            ]
            heading = f"{one.size.words}: {parts.strategy} minus {parts.control}"
            groups.append(RowGroup(heading, [[Cell(text) for text in row] for row in rows]))
    title = f"report split: gains in points over the best single pattern with equal budgets ({_where(selections[0])})"
    return Table(title, ["by its", "alone", "beside the other"], groups)


def _named(report: Reported, name: str | None) -> str:
    """Return a score with the name of what scored it; a dash for None."""
    return "-" if name is None else f"{percent(report.scores[name].mean)} ({name})"


def _where(selection: SelectionResult) -> str:
    return f"{selection.protocol}, {asked(selection.report.asked)}"


def _stages(selection: SelectionResult, result: PhaseResult) -> list[Table]:
    where = f"{selection.size.words}, {selection.protocol}, phases: {result.phases}"
    ranked = sorted(result.methods, key=lambda one: -one.first.mean)
    first = [[one.name, one.kind, percent(one.first.mean)] for one in ranked[:SHOWN]]
    left = (f"{len(ranked) - SHOWN} more",) if len(ranked) > SHOWN else ()
    second = []
    for one in result.methods:
        if one.second is not None:
            cells = [Cell(one.name, one.name == result.written), Cell(one.kind), Cell(interval(one.second))]
            lead = ["", "", ""]
            if one.lead is not None and one.chance is not None:
                accepted = "yes" if one.accepted else "no"
                lead = [f"{_points(one)} {outcomes(one.lead)}", chance_of(one.chance), accepted]
            second.append([*cells, *map(Cell, lead)])
    title = f"first stage: {asked(result.first)} ({where})"
    header = ["second stage", "kind", "score", f"minus {result.best} (won / tied / lost)", "chance", "accepted"]
    return [
        Table.plain(title, ["first stage", "kind", "score"], first, left),
        Table(f"second stage: {asked(result.second)}", header, [RowGroup("", second)], (decision(result),)),
    ]


def report_table(selection: SelectionResult) -> Table:
    report, chosen = selection.report, selection.chosen
    told = [
        (FULL, "no eviction"), (chosen.winner, "winner"), (chosen.best, "best baseline"),
        (None if report.parts is None else report.parts.control, "best pattern"), (selection.even, "uniform"),
        (POLICIES_ALONE, "part of top 1"), (BUDGETS_ALONE, "part of top 1"),
    ]  # fmt: skip
    kinds = {one.name: one.kind for one in chosen.methods}
    roles = {name: ", ".join(role for whose, role in told if whose == name) or kinds[name] for name in report.scores}
    rows = [
        [
            Cell(name, name == chosen.written), Cell(roles[name]), Cell(interval(score)),
            Cell(f"{report.held[name].entries:.0f}"), Cell(f"{report.held[name].most:.0f}"),
        ]
        for name, score in best_first(report.scores)
    ]  # fmt: skip
    header = ["report", "what it is", "score", "entries", "most entries"]
    title = f"report split: {asked(report.asked)}, phases: {chosen.phases}"
    return Table(title, header, [RowGroup("", rows)], (gap(selection), *notes(selection)))


def best_first(scores: Mapping[str, Estimate]) -> list[tuple[str, Estimate]]:
    """Return names and scores, the full cache first, then by score; of equal ones by name."""
    return sorted(scores.items(), key=lambda one: (one[0] != FULL, -one[1].mean, one[0]))


def _points(one: MethodResult) -> str:
    return "" if one.lead is None else interval(one.lead, "+.2f", noun=" points")


def asked(count: QuestionCount) -> str:
    """Say how many questions about how many contexts were asked."""
    lengths = [length for length in (count.shortest, count.longest) if length is not None]
    return about(count.questions, count.contexts, lengths)
