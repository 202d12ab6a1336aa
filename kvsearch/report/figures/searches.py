"""Figures of a search: how it converged beside its start plans, and what it found against what it was compared with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsearch.report.figures.data import Axis, Figure, LineChart, Series
from kvsearch.report.figures.results import SCORE, level, measured, report_figure
from kvsearch.report.numbers import asked_words
from kvsearch.results.search import AnySearch, StoredSearch, Trace
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
        heading = f"chosen: {found.chosen}"
        yield report_figure(f"report{stem}", f"{budget} entries per kv head", caption, heading, found.report)
    if len(result.found) > 1:
        yield _front(result, caption)


def _front(result: AnySearch, caption: str) -> Figure:
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
    body = LineChart(Axis("entries per kv head", log=True), SCORE, (level(FULL, first.report[FULL]), *series))
    return Figure("front", "Score against size: searched at every budget", caption, body)


def _convergence(trace: Trace, result: AnySearch | None) -> Figure:
    """Return the best value so far over candidates, every generation's best, and known start plans as levels."""
    searches: dict[str, list[tuple[int, float]]] = {}
    for count, line in trace.generations:
        budget, several, _ = line.stage.partition(": ")  # empty where there is one search alone
        searches.setdefault(budget if several else "", []).append((count, min(line.values)))
    if len(searches) > 1:
        series = [_best_so_far(f"best so far, {name}", points) for name, points in searches.items()]
    else:
        steps = [(count, line.value) for count, line in trace.steps]
        generations = [point for points in searches.values() for point in points]
        known = {line.where: line.value for _, line in trace.steps}
        for found in () if result is None else result.found.values():
            known |= {one.where: one.value for one in found.finalists.values() if one.value is not None}
        starts = {where: value for where, value in known.items() if where.startswith("start ")}
        series = [
            _best_so_far("best so far", [*steps, (trace.evaluations, steps[-1][1])]),
            Series("best of a generation", *_columns(generations), style="points", muted=True),
            *(Series(where, (), (value,), style="level", muted=True) for where, value in starts.items()),
        ]
    values = [y for one in series for y in one.y]
    wide = min(values) > 0 and max(values) > WIDE * min(values)
    body = LineChart(Axis("candidates evaluated"), Axis("value that is minimised", log=wide), tuple(series))
    unfinished = "" if result is not None else ", not finished"
    caption = f"{trace.evaluations} candidates, {trace.tokens:,} tokens, {trace.seconds:.0f} s{unfinished}"
    return Figure("convergence", "How the search converged", caption, body)


def _best_so_far(name: str, points: list[tuple[int, float]]) -> Series:
    counts, values = _columns(points)
    return Series(name, counts, tuple(np.minimum.accumulate(values).tolist()), style="steps")


def _columns(points: list[tuple[int, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(float(x) for x, _ in points), tuple(y for _, y in points)
