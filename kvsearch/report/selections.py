"""Sentences and tables about the result of a selection or a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvsearch.core.arrays import TIE
from kvsearch.core.printed import pluralize
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.statistics import RETAINED
from kvsearch.plan import Plan
from kvsearch.report.plans import describe_guarantee
from kvsearch.report.table import (
    Cell,
    Table,
    describe_questions,
    format_bounds,
    format_chance,
    format_interval,
    format_nats,
    format_outcomes,
    format_percent,
)
from kvsearch.results.selection import RunResult, SelectionResult, SelectionsResult
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.selection.records import (
    MIN_CONTEXTS_FOR_PROOF,
    MethodKind,
    MethodResult,
    PhaseResult,
    PlanPart,
    RaceVerdict,
    ReportScores,
    Rule,
    Screening,
    Selection,
    TriedBudget,
)

PARTS: dict[PlanPart, tuple[str, str]] = {  # what brings something, and what the plan is with it
    "rankings": ("its rankings bring", "its rankings with even budgets"),
    "budgets": ("its budgets bring", "its rankings with its budgets"),
    "carry": ("what its entries carry brings", ""),
}
IS_BETTER: dict[RaceVerdict, str] = {
    "beats": "beats",
    "likely": "is likely better than",
    "cheaper": "is no worse than, and spares the second reading of,",
}
MAX_RACE_ROWS = 16  # rows of the table of a race
DECODE_ONLY = (
    "decode-only strategies hold the full cache at the end of prefill: their peak memory is that of no eviction"
)


def make_selection_result(selection: Selection, plan: str | None = None) -> SelectionResult:
    """Return everything that a selection found, with the file of its plan."""
    job = selection.job
    notes = [*selection.chosen.notes, *selection.report.notes]
    screening = selection.chosen.screening
    if screening is not None and screening.dropped:
        notes.append(describe_screening(screening))
    if selection.chosen.phases == "decode":
        notes.append(DECODE_ONLY)
    return SelectionResult(
        model=job.race.prepared.loaded.name,
        budget=job.size.budget,
        ratio=job.size.ratio,
        protocol=job.protocol,
        seed=job.seed,
        rule=job.race.rule,
        chosen=selection.chosen,
        decision=describe_decision(selection.chosen),
        total=selection.plan.total,
        uniform=job.race.candidate_set.even,
        report=selection.report,
        reported=report_words(selection),
        notes=tuple(dict.fromkeys(notes)),
        loss=selection.loss,
        plan=plan,
    )


def describe_decision(result: PhaseResult) -> str:
    """Say what is written for one phase setting, and how sure that is, in one sentence."""
    baselines = _count_kind(result, "baseline")
    asked_about = f"{pluralize(result.asked.questions, 'question')} about {pluralize(result.asked.contexts, 'context')}"
    leader = result.leader
    if leader is None:
        return f"{result.best}, the best of {baselines}, is written: every strategy is a baseline, too"
    lead = _describe_lead(leader, result)
    note = (
        "; with fewer than 8 contexts no lead is beyond chance"
        if result.asked.contexts < MIN_CONTEXTS_FOR_PROOF
        else ""
    )
    if result.verdict != "baseline":
        is_better = IS_BETTER[result.verdict]
        if result.verdict == "beats":
            left = result.available - result.asked.contexts
            note = f"; {left} more were not needed" if left else ""
        said = f"{leader.name} {is_better} {result.best}, the best of {baselines}: {lead}, on {asked_about}{note}"
        return said + describe_lower_tasks(result)
    wanted = "likely better" if result.sure < 1 - Rule.level else "better beyond chance"
    candidates = _count_kind(result, "candidate")
    return (
        f"{result.best}, the best of {baselines}, is written: none of {candidates} is {wanted} on {asked_about}; the "
        f"nearest is {leader.name}, {lead}{note}"
    )


def _count_kind(result: PhaseResult, kind: MethodKind) -> str:
    """Count candidates or baselines, and those among them that were dropped before they replied."""
    text = pluralize(result.count(kind), kind)
    dropped = 0 if result.screening is None else result.screening.count(kind)
    return f"{text} ({dropped} dropped by loss)" if dropped else text


def describe_screening(screening: Screening) -> str:
    """Say how many were dropped before they replied, and by what."""
    minimum = min(method.loss for method in screening.dropped)
    return (
        f"dropped by loss, before any reply: {pluralize(screening.count('candidate'), 'candidate')} and "
        f"{pluralize(screening.count('baseline'), 'baseline')}; "
        f"on {describe_questions(screening.asked)} the right replies lose at "
        f"least {minimum:.2f} nats per token more than under {screening.best}"
    )


def describe_lower_tasks(result: PhaseResult) -> str:
    """Say on which kinds of questions the winner scores less than the best baseline, after its lead; "" if on none."""
    return f"; it scores less on {' and '.join(result.lower)}" if result.lower else ""


def report_ahead_words(report: ReportScores) -> str:
    """Say of a report what `describe_higher_plans` says."""
    others = len(report.scores) - 2
    if not report.nats:
        return describe_higher_plans(report.ahead, others)
    plans = {name: loss.difference for name, loss in report.nats.items() if name != FULL and loss.difference}
    lower = {name: plans[name] for name in sorted(plans, key=lambda name: plans[name].mean) if plans[name].mean < -TIE}
    return describe_higher_plans(lower, others, on_text=True)


def describe_higher_plans(ahead: Mapping[str, Estimate], others: int, *, on_text: bool = False) -> str:
    """Say how many of the `others` of a report are better than what was written, and whether that may be chance.

    `ahead` are the differences of these, the largest first: in scores, or in losses if `on_text`, where less is better.
    """
    if not ahead:
        return ""
    name, lead = next(iter(ahead.items()))
    surely = sum(gain.low > 0 or gain.high < 0 for gain in ahead.values())
    chance = "within chance" if surely == 0 else f"{surely} of them beyond chance"
    if math.isnan(lead.low):
        chance = "on too few contexts to say more"
    better = "lose less" if on_text else "score higher"
    lead_text = f"{format_nats(lead, '+')} nats per token" if on_text else format_interval(lead, "+.1f", noun=" points")
    return f"{len(ahead)} of {pluralize(others, 'other')} in the report {better}, {chance}: {name} by {lead_text}"


def describe_retained(selection: SelectionResult) -> str | None:
    """Warn of a plan that keeps less of what a model was told than of its score; None unless that is beyond chance."""
    gap = selection.report.retained_gap
    if gap is None or not gap.low > 0:
        return None
    name = selection.chosen.written
    share = format_percent(selection.report.retained[name].mean, 0)
    return (
        f"{name} keeps {share}% of what the full cache does of retain:* (formats, instructions, refusals), which is "
        f"{format_interval(gap, '.0f', noun=' points')} less than it keeps of the other scores: keep more, or look at "
        "its replies before it is used where that matters"
    )


def describe_results(result: SelectionResult | SelectionsResult) -> str:
    """Say which plan to deploy at every size, and what it scores."""
    plans = []
    for choice in result.choices:
        name = choice.chosen.written
        score = f"score {format_percent(choice.report.scores[name].mean, 1)}"
        if choice.report.nats:
            score = f"{choice.report.nats[name].excess.mean:.4f} nats per token above the full cache"
        plans.append(f"{name} at {100 * choice.kept_share:.2g}% of the cache ({score})")
    report = result.choices[-1].report
    full = f"the full cache scores {format_percent(report.scores[FULL].mean, 1)}"
    if report.nats:
        full = f"the full cache itself has {report.nats[FULL].loss.mean:.4f} nats per token"
    return f"Deploy {' or '.join(plans)}; {full}"


def report_words(selection: Selection) -> str:
    """Say what the plan scores on the report split beside what it is compared with, in one sentence.

    On text that is what each loses above the full cache.
    """
    report = selection.report
    chosen = selection.chosen
    if report.nats:
        best_loss = report.nats[chosen.best]
        parts = [
            f"{chosen.written} {format_nats(report.nats[chosen.written].excess)} nats per token above the full cache"
        ]
        if best_loss.difference is not None:
            parts.append(f"{chosen.best}, the best baseline, {format_nats(best_loss.excess)}")
            parts.append(f"{chosen.best} minus {chosen.written} {format_nats(best_loss.difference, '+')}")
        parts.append(f"full cache itself {format_nats(report.nats[FULL].loss)}; lower is better")
        return f"report split, {describe_questions(report.asked)}: {'; '.join(parts)}"
    written, best, full = (report.scores[name] for name in (chosen.written, chosen.best, FULL))
    parts = [f"{chosen.written} {format_percent(written.mean, 1)} {format_bounds(written, '.1f')}"]
    if chosen.winner:
        parts.append(f"{chosen.best}, the best baseline, {format_percent(best.mean, 1)} {format_bounds(best, '.1f')}")
    parts.append(f"full cache {format_percent(full.mean, 1)} {format_bounds(full, '.1f')}")
    parts.append(f"full cache minus plan {format_interval(selection.loss, '+.1f', noun=' points')}")
    if report.share is not None:
        within = format_gap_bounds(report.share, "unbounded")
        parts.append(f"{format_percent(report.share.mean, 0)}% of the gap to the full cache is recovered ({within})")
    return f"report split, {describe_questions(report.asked)}: {'; '.join(parts)}"


def format_gap_bounds(share: Estimate, unbounded: str) -> str:
    """Write the ends of the share of a gap that is closed."""
    return " to ".join(
        unbounded if math.isnan(end) else f"{format_percent(end, 0)}%" for end in (share.low, share.high)
    )


def make_lead_cells(lead: Difference | None, chance: float | None) -> list[Cell]:
    """Return the cells of a lead and its chance; empty ones where nothing was compared."""
    if lead is None or chance is None:
        return [Cell("")] * 2
    return [Cell.mean(lead, "+.2f"), Cell(format_chance(chance), value=chance)]


def make_tables(*selections: SelectionResult) -> list[Table]:
    """Return the race and the report of every selection."""
    return [table for selection in selections for table in (_make_race_table(selection), make_report_table(selection))]


def _make_race_table(selection: SelectionResult) -> Table:
    """Make the table of a race: scores of candidates and baselines until they were dropped, longest first."""
    result = selection.chosen
    rows = []
    for method in result.methods[:MAX_RACE_ROWS]:
        score = Cell.mean(method.score)
        lead, chance = make_lead_cells(method.lead, method.chance)
        if method.lead is not None:
            difference = format_interval(method.lead, "+.2f", noun=" points")
            if method.nats is not None and method.nats.difference is not None:
                difference = format_nats(method.nats.difference, "+")
                lead = lead._replace(value=method.nats.difference.mean)
            lead = lead._replace(text=f"{difference} {format_outcomes(method.lead)}")
        if method.nats is not None:
            score = Cell.nats(method.nats.excess)
        contexts = Cell.number(method.contexts, ".0f")
        name = Cell(method.name, method.name == result.written)
        rows.append([name, Cell(method.kind), contexts, score, lead, chance])
    left = len(result.methods) - MAX_RACE_ROWS
    notes = [selection.decision]
    if left > 0:
        notes.append(f"{left} more")
    compared = f"minus {result.best} (won / tied / lost)"
    header = ["choice", "kind", "contexts", _find_heading(selection.report), compared, "chance"]
    where = f"{selection.size.words}, {selection.protocol}, phases: {result.phases}"
    title = f"choice: {describe_questions(result.asked)} of {result.available} ({where})"
    return Table(title, header, [("", rows)], tuple(notes))


def make_report_table(selection: SelectionResult) -> Table:
    report = selection.report
    chosen = selection.chosen
    notes = [
        (FULL, "no eviction"), (chosen.winner, "winner"), (chosen.best, "best baseline"),
        (selection.uniform, "uniform"),
    ]  # fmt: skip
    kinds = {method.name: method.kind for method in chosen.methods}
    roles = {
        name: ", ".join(role for whose, role in notes if whose == name) or kinds.get(name, "") for name in report.scores
    }
    scores = {name: Cell.mean(score) for name, score in sort_best_first(report.scores)}
    if report.nats:
        least_first = sorted(
            report.nats.items(), key=lambda method: (method[0] != FULL, method[1].excess.mean, method[0])
        )
        scores = {name: Cell.nats(loss.excess) for name, loss in least_first}
    rows = [
        [
            Cell(name, name == chosen.written), Cell(roles[name]), score,
            *([Cell.mean(report.retained[name])] if report.retained else []),
            Cell.number(report.held[name].entries, ".0f"), Cell.number(report.held[name].most, ".0f"),
        ]
        for name, score in scores.items()
    ]  # fmt: skip
    retained = [RETAINED] if report.retained else []
    header = ["report", "what it is", _find_heading(report), *retained, "entries", "most entries"]
    title = f"report split: {describe_questions(report.asked)}, phases: {chosen.phases}"
    return Table(title, header, [("", rows)], (selection.reported, *selection.notes))


def score_facts(report: ReportScores, name: str) -> Iterator[tuple[str, str]]:
    """Yield what a plan scores in a report, what the full cache does, and what the best candidate leads by, named."""
    if report.nats:
        yield "nats above full", format_nats(report.nats[name].excess)
        yield "full cache itself", format_nats(report.nats[FULL].loss)
        return
    yield "score", format_interval(report.scores[name], ".1f")
    yield "full cache", format_interval(report.scores[FULL], ".1f")
    if report.lead:
        yield "best candidate's lead", format_interval(report.lead, "+.1f")


def _find_heading(report: ReportScores) -> str:
    """Return the heading of what methods are compared by."""
    return "nats above full" if report.nats else "score"


def sort_best_first(scores: Mapping[str, Estimate]) -> list[tuple[str, Estimate]]:
    """Return names and scores, the full cache first, then by score; of equal ones by name."""
    return sorted(scores.items(), key=lambda item: (item[0] != FULL, -item[1].mean, item[0]))


def _describe_lead(method: MethodResult, result: PhaseResult) -> str:
    """Say what a candidate leads by, at the least, and the chance of that; its level where several races share one."""
    assert method.lead is not None
    assert method.chance is not None
    shared = f", where {result.level:.2g} or less counts" if result.level < min(Rule.level, 1 - result.sure) else ""
    at_least = (
        "" if result.bound is None else f", at least {100 * result.bound:+.2f} with {format_percent(result.sure, 0)}%"
    )
    lead = find_lead_on_text(method) or f"{100 * method.lead.mean:+.2f} points{at_least}"
    spared = "" if method.spared is None else f", right replies lose {format_nats(method.spared)} nats per token less"
    return f"{lead} (chance {format_chance(method.chance)}{shared}){spared}"


def find_lead_on_text(method: MethodResult) -> str | None:
    """Say how far the loss of a method is from that of the best baseline; None where that is not what counts."""
    if method.nats is None or method.nats.difference is None:
        return None
    return f"{format_nats(method.nats.difference, '+')} nats per token, lower is better"


def list_run_parts(content: RunResult) -> Iterator[str | Table]:
    """List the choice at each size as sentences and tables, and the sizes that were tried."""
    for choice in content.choices:
        yield from describe_selection(choice)
    for choice in content.choices:
        yield from make_tables(choice)
    if content.tried:
        rows = [
            [step.budget, step.name, format_percent(step.loss), "yes" if step.confirmed else "no"]
            for step in content.tried
        ]
        columns = ["budget", "best", "points lost", "shown"]
        yield Table.plain("budgets that were tried", columns, rows, words=("best", "shown"))


def describe_smallest(tried: Sequence[TriedBudget], longest: int, plan: Plan) -> str:
    """Say which budget is the smallest that is shown to lose little, of those `tried`, and what it loses at most.

    `longest` are the tokens of the longest context.
    """
    last = [step for step in tried if step.confirmed][-1]
    steps = ", ".join(f"{step.budget}: {100 * step.loss:.1f}" for step in tried)
    return (
        f"{last.budget} entries per kv head, {format_percent(last.budget / longest, 0)}% of {longest} tokens, are the "
        f"fewest of those tried of which that is shown: {describe_guarantee(plan)} (points lost by what was tried: "
        f"{steps})"
    )


def describe_selection(selection: SelectionResult) -> Iterator[str]:
    """Say what was chosen and why, then what it scores on the report split."""
    ahead = report_ahead_words(selection.report)
    yield f"{selection.decision}{f'; {ahead}' if ahead else ''}"
    yield selection.reported
    yield from describe_parts(selection)


def describe_parts(selection: SelectionResult) -> Iterator[str]:
    """Say what each part of the plan that was written adds to the parts before it, a line each."""
    before = f"{selection.uniform} with even budgets"
    for part, added in selection.report.parts.items():
        brings, plan = PARTS[part]
        gain = format_interval(added, "+.1f", noun=" points")
        if selection.report.nats:
            gain = f"{format_nats(added, '+')} nats per token saved"
        yield f"report split, {brings} {gain} beside {before}"
        before = plan
