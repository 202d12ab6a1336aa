"""Figures of a search: how it converged beside its start plans, and what it found against what it was compared with."""

from __future__ import annotations

from collections.abc import Iterator

from kvsearch.report.asked import asked_words
from kvsearch.report.figures.data import Axis, Figure, Intervals, Lines, Series
from kvsearch.report.figures.scores import SCORE, estimated, level, measured
from kvsearch.report.files.search import Generation, SearchResult, StoredSearch, Trace
from kvsearch.search.names import EVOLVED, EXPANDED
from kvsearch.strategies.names import FULL

WIDE = 20.0  # from this largest over smallest value on, a scale is logarithmic


def search_figures(content: StoredSearch) -> Iterator[Figure]:
    """Yield convergence and, of a finished search, the report split, budgets, and score against size of a front."""
    if content.trace is not None and content.trace.steps:
        yield _convergence(content.trace, content.result)
    if (result := content.result) is None:
        return
    told = f", {asked_words(result.asked['report'])}" if "report" in result.asked else ""
    caption = f"{result.model}: {result.settings.get('protocol')}{told}; 95% intervals"
    for budget, found in result.found.items():
        stem = f"-{budget}" if len(result.found) > 1 else ""
        body = Intervals(SCORE, ((f"chosen: {found.chosen}", estimated(found.report)),), None)
        yield Figure(f"report{stem}", f"Report split at {budget} entries per kv head", caption, body)
    if len(result.found) > 1:
        yield _front(result, caption)


def _front(result: SearchResult, caption: str) -> Figure:
    """Return score against size: searched, the smallest plan scaled, and baselines (EvolKV, Figure 1)."""
    first = next(iter(result.found.values()))
    names = dict.fromkeys(name for found in result.found.values() for name in found.report if name != FULL)
    kept = [name for name in (EVOLVED, EXPANDED, *names) if name in names and not name.startswith("#")]
    series = [
        measured(
            {EVOLVED: "searched", EXPANDED: "scaled from the smallest"}.get(name, name),
            [(budget, found.report[name]) for budget, found in result.found.items() if name in found.report],
            muted=name not in (EVOLVED, EXPANDED),
        )
        for name in dict.fromkeys(kept)
    ]
    body = Lines(Axis("entries per kv head", log=True), SCORE, (level(FULL, first.report[FULL]), *series))
    return Figure("front", "Score against size: searched at every budget", caption, body)


def _convergence(trace: Trace, result: SearchResult | None) -> Figure:
    """Return the best value so far over candidates, every generation's best, and start plans as levels."""
    budgets = dict.fromkeys(_prefix(one) for one in trace.generations)
    series = list[Series]()
    if len(budgets) < 2:
        steps = [(one.evaluations, one.value) for one in trace.steps]
        steps += [(trace.evaluations, steps[-1][1])] if trace.evaluations > steps[-1][0] else []
        series.append(_series("best so far", steps, "steps"))
        each = [(one.evaluations, one.values[0]) for one in trace.generations]
        series.append(_series("best of a generation", each, "points", muted=True))
        series += _starts(trace, result)
    for budget in budgets if len(budgets) > 1 else ():
        best, found = float("inf"), list[tuple[int, float]]()
        for one in trace.generations:
            if _prefix(one) == budget:
                best = min(best, one.values[0])
                found.append((one.evaluations, best))
        series.append(_series(f"best so far, {budget}", found, "steps"))
    values = [y for one in series for y in one.y]
    wide = min(values) > 0 and max(values) > WIDE * min(values)
    body = Lines(Axis("candidates evaluated"), Axis("value that is minimised", log=wide), tuple(series))
    unfinished = "" if result is not None else ", not finished"
    caption = f"{trace.evaluations} candidates, {trace.tokens:,} tokens, {trace.seconds:.0f} s{unfinished}"
    return Figure("convergence", "How the search converged", caption, body)


def _starts(trace: Trace, result: SearchResult | None) -> Iterator[Series]:
    """Yield the values of the start plans, as far as they are known."""
    known = {one.where: one.value for one in trace.steps if one.where.startswith("start ")}
    if result is not None:
        for found in result.found.values():
            known |= {one.where: one.value for one in found.finalists.values() if one.value is not None
                      and one.where.startswith("start ")}  # fmt: skip
    for where, value in known.items():
        yield Series(where, (), (value,), style="level", muted=True)


def _series(name: str, points: list[tuple[int, float]], style: object, muted: bool = False) -> Series:
    x, y = tuple(float(at) for at, _ in points), tuple(value for _, value in points)
    return Series(name, x, y, style="steps" if style == "steps" else "points", muted=muted)


def _prefix(one: Generation) -> str:
    """Return which search of several a generation belongs to: "budget 64"; empty of one alone."""
    name, found, _ = one.stage.partition(": ")
    return name if found else ""
