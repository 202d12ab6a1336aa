"""What a selection or a run found: the decisions in words, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvsearch.report.numbers import asked, bounds, chance_of, counted, interval, outcomes, percent
from kvsearch.report.table import Cell, RowGroup, Table
from kvsearch.results.selection import PhaseOutcome, RunChoice, RunResult, SelectionResult
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.selection.acceptance import GapClosed, Rule
from kvsearch.selection.selection import (
    BUDGETS_ALONE,
    POLICIES_ALONE,
    MethodResult,
    PhaseResult,
    Reported,
    Selection,
)
from kvsearch.strategies.names import FULL

if TYPE_CHECKING:
    from kvsearch.selection.selection_job import Smallest

SHOWN = 10  # rows of the table of a first stage


def selection_result(selection: Selection, plan: str | None = None) -> SelectionResult:
    """Return everything that a selection found, with the file of its plan."""
    return SelectionResult.of(selection, *told(selection), plan=plan)


def told(selection: Selection) -> tuple[list[str], str]:
    """Say what was decided in each phase setting, and what the report split says of the choice."""
    return [decision(result) for result in selection.results], gap(selection)


def decision(result: PhaseResult) -> str:
    """Say what was decided for one phase setting and why, in one sentence."""
    baselines = counted(result.count("baseline"), "baseline")
    finalists = result.finalists
    leader = result.leader
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


def gap(selection: Selection) -> str:
    """Say what the report split says of the choice, in one sentence."""
    report = selection.report
    best = selection.chosen.best
    fresh = f"{asked(report.asked)} of the report split"
    if report.gain is None:
        return f"on {fresh} {best} scores {percent(report.scores[best].mean)}"
    share = "no gap: the full cache is not above the best baseline"
    if report.share is not None:
        within = f"95% interval {gap_bounds(report.share, 'unbounded')}"
        share = f"{percent(report.share.mean, 0)}% of the gap to the full cache is recovered ({within})"
    lead = interval(report.gain, "+.2f", noun=" points")
    return f"{selection.chosen.winner} minus {best} on {fresh}: {lead}; {share}"


def gap_bounds(share: GapClosed, unbounded: str) -> str:
    """Write the ends of the share of a gap that is closed."""
    return " to ".join(unbounded if end is None else f"{percent(end, 0)}%" for end in (share.low, share.high))


def lead_cells(lead: Difference | None, chance: float | None, accepted: bool | None) -> list[Cell]:
    """Return the cells of a lead, its chance, and whether it was accepted; empty ones where nothing was compared."""
    if lead is None or chance is None:
        return [Cell("")] * 3
    return [Cell.mean(lead, "+.2f"), Cell(chance_of(chance), value=chance), Cell("yes" if accepted else "no")]


def tables(*selections: SelectionResult) -> list[Table]:
    """Return both stages and the report of every selection, then what all report on the candidates, by size.

    The selections are of one profile at several sizes, whose reports ask the same questions.
    """
    found = [table for one in selections for table in stage_tables(one)]
    leading = [one for one in selections if one.chosen.leader is not None]
    return [*found, *([_budget_table(leading), _part_table(leading)] if leading else [])]


def stage_tables(selection: SelectionResult) -> list[Table]:
    """Return both stages of every phase setting, and the report."""
    stages = [table for outcome in selection.outcomes for table in _stages(selection, outcome)]
    return [*stages, report_table(selection)]


def _budget_table(selections: Sequence[SelectionResult]) -> Table:
    """Return the best candidates with equal budgets and with budgets of their own at every size (PolyKV, Table 2)."""
    rows: list[list[str | Cell]] = []
    for one in selections:
        report = one.report
        found = report.by_budgets
        if found is not None:
            rows.append([
                one.size.words, _named(report, one.chosen.best), _named(report, found.equal), _named(report, found.own),
                "" if found.gain is None else Cell.mean(found.gain, "+.2f"),
            ])  # fmt: skip
    header = ["", "best baseline", "equal budgets", "own budgets", "own minus equal"]
    note = "the best candidate of either kind: by the second stage if one of the kind is a finalist, else by the first"
    return Table.plain(f"report split: what budgets bring ({_where(selections[0])})", header, rows, notes=(note,))


def _part_table(selections: Sequence[SelectionResult]) -> Table:
    """Return what the leader gains by its policies and what by its budgets at every size."""
    groups = []
    for one in selections:
        if (parts := one.report.parts) is not None:
            rows = [
                [Cell(name), Cell.mean(gained.alone, "+.2f"), Cell.mean(gained.beside, "+.2f")]
                for name, gained in (("policies", parts.policies), ("budgets", parts.budgets))
            ]
            rows.append([Cell("both"), Cell.mean(parts.both, "+.2f"), Cell("")])
            heading = f"{one.size.words}: {parts.strategy} minus {parts.control}"
            groups.append(RowGroup(heading, rows))
    title = f"report split: gains in points over the best single pattern with equal budgets ({_where(selections[0])})"
    return Table(title, ["by its", "alone", "beside the other"], groups)


def _named(report: Reported, name: str | None) -> str:
    """Return a score with the name of what scored it; a dash for None."""
    return "-" if name is None else f"{percent(report.scores[name].mean)} ({name})"


def _where(selection: SelectionResult) -> str:
    return f"{selection.protocol}, {asked(selection.report.asked)}"


def _stages(selection: SelectionResult, result: PhaseOutcome) -> list[Table]:
    where = f"{selection.size.words}, {selection.protocol}, phases: {result.phases}"
    ranked = sorted(result.methods, key=lambda one: -one.first.mean)
    first = [[one.name, one.kind, Cell(percent(one.first.mean), value=one.first.mean)] for one in ranked[:SHOWN]]
    left = (f"{len(ranked) - SHOWN} more",) if len(ranked) > SHOWN else ()
    second = []
    for one in result.methods:
        if one.second is not None:
            lead, *verdict = lead_cells(one.lead, one.chance, one.accepted)
            if one.lead is not None:
                lead = lead._replace(text=f"{_points(one)} {outcomes(one.lead)}")
            named = Cell(one.name, one.name == result.written)
            second.append([named, Cell(one.kind), Cell.mean(one.second), lead, *verdict])
    title = f"first stage: {asked(result.first)} ({where})"
    header = ["second stage", "kind", "score", f"minus {result.best} (won / tied / lost)", "chance", "accepted"]
    return [
        Table.plain(title, ["first stage", "kind", "score"], first, notes=left),
        Table(f"second stage: {asked(result.second)}", header, [RowGroup("", second)], (result.decision,)),
    ]


def report_table(selection: SelectionResult) -> Table:
    report = selection.report
    chosen = selection.chosen
    told = [
        (FULL, "no eviction"), (chosen.winner, "winner"), (chosen.best, "best baseline"),
        (None if report.parts is None else report.parts.control, "best pattern"), (report.uniform, "uniform"),
        (POLICIES_ALONE, "part of top 1"), (BUDGETS_ALONE, "part of top 1"),
    ]  # fmt: skip
    kinds = {one.name: one.kind for one in chosen.methods}
    roles = {name: ", ".join(role for whose, role in told if whose == name) or kinds[name] for name in report.scores}
    rows = [
        [
            Cell(name, name == chosen.written), Cell(roles[name]), Cell.mean(score),
            Cell.number(report.held[name].entries, ".0f"), Cell.number(report.held[name].most, ".0f"),
        ]
        for name, score in best_first(report.scores)
    ]  # fmt: skip
    header = ["report", "what it is", "score", "entries", "most entries"]
    title = f"report split: {asked(report.asked)}, phases: {chosen.phases}"
    return Table(title, header, [RowGroup("", rows)], (report.words, *selection.notes))


def best_first(scores: Mapping[str, Estimate]) -> list[tuple[str, Estimate]]:
    """Return names and scores, the full cache first, then by score; of equal ones by name."""
    return sorted(scores.items(), key=lambda one: (one[0] != FULL, -one[1].mean, one[0]))


def _points(one: MethodResult) -> str:
    return "" if one.lead is None else interval(one.lead, "+.2f", noun=" points")


def run_result(found: Sequence[Selection], files: Sequence[str], smallest: Smallest | None = None) -> RunResult:
    """Return everything by size; `files` are the names of the plans, `smallest` is how a size was found."""
    sizes = {
        str(one.size): RunChoice.of(one, *told(one), loss=one.loss, plan=file, words=tuple(sentences(one)))
        for one, file in zip(found, files, strict=True)
    }
    return RunResult(sizes=sizes, tried=() if smallest is None else smallest.tried)


def run_parts(content: RunResult) -> Iterator[str | Table]:
    """Yield what was chosen at each size, in words and as tables, and what was tried to find the size."""
    for one in content.choices:
        yield from one.words
    for one in content.choices:
        yield from stage_tables(one)
    if content.tried:
        rows = [
            [step.budget, step.name, percent(step.loss), "second stage" if step.confirmed else "first stage"]
            for step in content.tried
        ]
        columns = ["budget", "best", "points lost", "asked"]
        yield Table.plain("budgets that were tried", columns, rows, words=("best", "asked"))


def smallest_words(found: Smallest, within: float, loss: Difference) -> str:
    """Say which budget is the smallest that loses at most `within` points, how that was found, and what is in doubt.

    `loss` is what the plan loses on the report split.
    """
    last = found.tried[-1]
    longest = found.selection.longest
    judged = sum(one.confirmed for one in found.tried)
    steps = ", ".join(f"{one.budget}: {100 * one.loss:+.1f}" for one in found.tried)
    asked = "questions that the budget was not found by"
    if judged > 1:
        asked = f"questions that {judged} budgets were judged by, this the first to hold"
    verdict = "leaves that in doubt"
    if 100 * loss.high <= within:
        verdict = "confirms that"
    elif 100 * loss.low > within:
        verdict = "contradicts that: keep more"
    return (
        f"{last.budget} entries per kv head, {percent(last.budget / longest, 0)}% of {longest} tokens, are the fewest "
        f"of those tried at which the chosen plan loses at most {within:g} points: {100 * last.loss:+.1f} on {asked} "
        f"(points lost by what was tried: {steps}); the report split {verdict}"
    )


def sentences(one: Selection, *, several: bool = False) -> Iterator[str]:
    """Say what was chosen and why, then what it scores on the report split beside what it is compared with."""
    chosen = one.chosen
    report = one.report
    yield f"{f'{one.size.words}: ' if several else ''}{decision(chosen)}"
    written, best, full = (report.scores[name] for name in (chosen.written, chosen.best, FULL))
    parts = [f"{chosen.written} {percent(written.mean, 1)} {bounds(written, '.1f')}"]
    if chosen.winner:
        parts.append(f"{chosen.best}, the best baseline, {percent(best.mean, 1)} {bounds(best, '.1f')}")
    parts.append(f"full cache {percent(full.mean, 1)} {bounds(full, '.1f')}")
    behind = interval(one.loss, "+.1f", noun=" points")
    yield f"report split, {asked(report.asked)}: {'; '.join(parts)}; full cache minus plan {behind}"
