"""Figures of results and profiles: scores against entries, costs of caches, how a search went, losses, and signals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from kvsearch.core.items import group_by_key
from kvsearch.evaluation.names import EVOLVED, EXPANDED, FULL
from kvsearch.papers.tables import PAPER_TABLES, Picture
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO
from kvsearch.report.costs import SpeedView
from kvsearch.report.figures import Figure, HeatMap, LineChart, Role, Series, make_cells, make_layer_map
from kvsearch.report.paper_table import MeasuredCell, ReproducedTable
from kvsearch.report.profile import SHOWN_RATIO, TITLES, compute_eviction_losses, describe_profile, select_measures
from kvsearch.report.table import describe_coverage, describe_questions
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.results.search import SearchResult, Trace
from kvsearch.results.selection import SelectionResult, SelectionsResult
from kvsearch.runs.estimates import Estimate
from kvsearch.signals.table import SignalTable

SCORE_AXIS = "score, %"
NATS = "excess nats per token, lower is better"
HELD = "entries kept, all layers and kv heads"
WIDE = 20.0  # from this largest over smallest value on, a scale is logarithmic
Point = tuple[float, Estimate]
NUMBER_IN_NAME = re.compile(r"\d[\d,]*(\.\d+)?")  # in a name, such as 1,024 tokens


def make_score_figures(result: EvaluationResult) -> Iterator[Figure]:
    """Yield scores against entries, mean over all tasks; of text the loss above the full cache."""
    on_text = result.on_text
    points: dict[str, list[Point]] = {}
    for block in result.blocks:
        for method in block.methods:
            points.setdefault(method.name, []).append((method.held.entries, result.measured(method)))
    unit = 1 if on_text else 100
    lines = [make_series(name, line_points, unit=unit) for name, line_points in points.items()]
    full = make_full_level(result.measured(result.full), unit)
    body = LineChart(HELD, NATS if on_text else SCORE_AXIS, (full, *lines), log_x=True)
    caption = f"{result.protocol}, {result.phases}, {describe_coverage(result.tasks)}; 95% intervals"
    title = f"{_find_axis(on_text)} against entries kept: {result.overall.name}"
    yield Figure("scores", title, caption, body, leads=True)


def make_series(name: str, scores: Iterable[Point], role: Role = "", unit: float = 100) -> Series:
    """Return a line of scores in percent with their intervals, by what they are drawn over; of others times `unit`."""
    points = sorted(scores, key=lambda point: point[0])
    y, low, high = (tuple(unit * getattr(score, end) for _, score in points) for end in ("mean", "low", "high"))
    return Series(name, tuple(x for x, _ in points), y, low, high, role=role)


def make_full_level(score: Estimate, unit: float = 100) -> Series:
    """Return a horizontal line at the full cache's score in percent, or at another value times `unit`."""
    return Series(FULL, (), (unit * score.mean,), (unit * score.low,), (unit * score.high,), "level", "muted")


def _find_axis(on_text: bool) -> str:
    return "Loss above the full cache" if on_text else "Score"


def make_selection_figures(result: SelectionResult | SelectionsResult) -> Iterator[Figure]:
    """Yield score against entries over all sizes, with what was written marked."""
    choices = result.choices
    on_text = bool(choices[0].report.nats)
    unit = 1 if on_text else 100
    series = [make_full_level(_find_point(choices[0], FULL)[1], unit)]
    kinds = {method.name: method.kind for choice in choices for method in choice.chosen.methods}
    for name, kind in kinds.items():
        if points := [_find_point(choice, name) for choice in choices if name in choice.report.scores]:
            series.append(replace(make_series(name, points, kind, unit), low=None, high=None))
    series += [
        make_series(choice.chosen.written, [_find_point(choice, choice.chosen.written)], "written", unit)
        for choice in choices
    ]
    full = max(choice.report.held[FULL].entries for choice in choices)
    body = LineChart(
        "entries kept, and their share of the full cache", NATS if on_text else SCORE_AXIS, tuple(series), log_x=True,
        full=full, form="{:.4f}" if on_text else "{:.1f}",
    )  # fmt: skip
    first = choices[0]
    how = (
        f"{first.protocol}, {first.chosen.phases}, {describe_questions(first.report.asked)} that nothing was chosen by"
    )
    title = f"{_find_axis(on_text)} against entries kept"
    yield Figure("report", title, f"{how}; bars are 95% intervals", body, leads=True)


def _find_point(result: SelectionResult, name: str) -> Point:
    report = result.report
    return report.held[name].entries, report.nats[name].excess if report.nats else report.scores[name]


def make_speed_figures(view: SpeedView) -> Iterator[Figure]:
    """Yield time per token and bytes held over each size that was measured at several values; over length if none."""
    sizes = [("length", "batch", "tokens of a prompt"), ("batch", "length", "sequences at a time")]
    several = [size for size in sizes if len({getattr(costs, size[0]) for costs in view.costs}) > 1]
    for name, fixed, label in several or sizes[:1]:
        largest = max(getattr(costs, fixed) for costs in view.costs)
        costs_at = [costs for costs in view.costs if getattr(costs, fixed) == largest]
        charts = [
            ("token", "Time per token", "ms per token", [1e3 * costs.token_seconds for costs in costs_at]),
            ("held", "Bytes that a cache holds", "MB", [costs.held_bytes / 1e6 for costs in costs_at]),
        ]
        for stem, title, unit, values in charts:
            series = []
            for cache, group in group_by_key(zip(costs_at, values, strict=True), lambda pair: pair[0].cache).items():
                x, y = zip(*sorted((getattr(costs, name), value) for costs, value in group), strict=True)
                series.append(Series(cache, x, y))
            body = LineChart(label, unit, tuple(series), log_x=True)
            yield Figure(f"{stem}-over-{name}", f"{title}, {fixed} {largest:,}", view.measured(), body)


def make_search_figures(content: SearchResult | Trace) -> Iterator[Figure]:
    """Yield convergence and, of a finished search at several budgets, score against size."""
    trace = content if isinstance(content, Trace) else content.trace
    if trace is not None and trace.best is not None:
        yield _draw_convergence(trace, is_finished=trace is not content)
    if isinstance(content, SearchResult) and len(content.found) > 1:
        yield _draw_front(content)


def _draw_front(result: SearchResult) -> Figure:
    """Return score against size: searched, the smallest plan scaled, and baselines (EvolKV, Figure 1)."""
    questions = describe_coverage(result.asked["report"])
    caption = f"{result.model}: {result.settings['protocol']}, {questions}; 95% intervals"
    first = next(iter(result.found.values()))
    names = dict.fromkeys(name for at_budget in result.found.values() for name in at_budget.report if name != FULL)
    kept = [name for name in (EVOLVED, EXPANDED, *names) if name in names and not name.startswith("#")]
    series = [
        make_series(
            {EVOLVED: "searched", EXPANDED: "scaled from the smallest"}.get(name, name),
            [
                (budget, at_budget.report[name])
                for budget, at_budget in result.found.items()
                if name in at_budget.report
            ],
            role="" if name in (EVOLVED, EXPANDED) else "muted",
        )
        for name in dict.fromkeys(kept)
    ]
    body = LineChart("entries per kv head", SCORE_AXIS, (make_full_level(first.report[FULL]), *series), log_x=True)
    return Figure("front", "Score against size: searched at every budget", caption, body, leads=True)


def _draw_convergence(trace: Trace, *, is_finished: bool) -> Figure:
    """Return the best value so far after every generation of each search."""
    searches: dict[str, list[tuple[int, float]]] = {}
    for count, line in trace.generations:
        budget, several, _ = line.stage.partition(": ")
        name = f"best so far, {budget}" if several else "best so far"
        searches.setdefault(name, []).append((count, min(line.values)))
    series = []
    for name, points in searches.items():
        counts, values = zip(*points, strict=True)
        series.append(Series(name, counts, tuple(np.minimum.accumulate(values).tolist()), style="steps"))
    reached = [y for series_line in series for y in series_line.y]
    wide = min(reached) > 0 and max(reached) > WIDE * min(reached)
    body = LineChart("candidates evaluated", "value that is minimised", tuple(series), log_y=wide)
    caption = trace.words if is_finished else f"{trace.words}, not finished"
    return Figure("convergence", "How the search converged", caption, body)


# --- tables of papers -------------------------------------------------------------------------------------------------


def make_table_figures(table: ReproducedTable) -> Iterator[Figure]:
    """Yield the pictures of a paper's table or figure that was made again, see `Picture`."""
    described = PAPER_TABLES.get(table.table)
    for picture in () if described is None else described.pictures:
        known = [cell for cell in table.cells if cell.value is not None]
        sides = group_by_key(known, attrgetter(picture.each))
        parts = {name: part for name, part in sides.items() if re.fullmatch(picture.of, name)}
        title = f"{table.title.partition(',')[0]}, {picture.title}, on {table.model}"
        caption = "; ".join(table.caption)
        if len(picture.labels) > 2 and parts:
            yield Figure(picture.name, title, caption, _make_cell_maps(parts, picture), leads=True)
            continue
        for name, part in parts.items():
            drawn = group_by_key(part, attrgetter(picture.lines)).values()
            lines = tuple(series for line in drawn for series in _group_cell_lines(line, picture))
            body = LineChart(picture.labels[0], picture.labels[1], lines, log_x=picture.log)
            suffix = "" if len(parts) == 1 else f": {name}"
            stem = "-".join([picture.name, *re.findall(r"\w+", suffix)])
            yield Figure(stem, f"{title}{suffix}", caption, body, leads=True)


def _group_cell_lines(line: Sequence[MeasuredCell], picture: Picture) -> Iterator[Series]:
    """Yield cells with numbers in their names as a line, others as levels."""
    name = getattr(line[0], picture.lines)
    points: list[tuple[float, MeasuredCell]] = []
    for cell in line:
        place = getattr(cell, picture.over)
        if (number := NUMBER_IN_NAME.search(place)) is not None:
            points.append((float(number[0].replace(",", "")), cell))
        elif picture.over != "column":
            yield Series(place or name, (), (cell.value or 0.0,), style="level", role="muted")
    if points:
        points.sort(key=lambda point: point[0])
        y, *ends = (tuple(getattr(cell, end) for _, cell in points) for end in ("value", "low", "high"))
        yield Series(name, tuple(x for x, _ in points), y, *(ends if None not in ends[0] else ()))


def _make_cell_maps(parts: Mapping[str, list[MeasuredCell]], picture: Picture) -> HeatMap:
    """Return a map of each part."""
    known = [cell for part in parts.values() for cell in part]
    columns = tuple(group_by_key(known, attrgetter(picture.over)))
    rows = tuple(group_by_key(known, attrgetter(picture.lines)))
    panels = {}
    for name, part in parts.items():
        at = {(getattr(cell, picture.lines), getattr(cell, picture.over)): cell.value or 0.0 for cell in part}
        values = np.array([[at.get((row, column), np.nan) for column in columns] for row in rows])
        if picture.relative:
            values /= np.nanmax(values, axis=1, keepdims=True)
        panels[name] = make_cells(values)
    row_label, column_label, value_label = picture.labels
    form = "{:.2g}" if picture.relative else "{:.0f}"
    return HeatMap(rows, columns, row_label, column_label, value_label, panels, form)


# --- profiles ---------------------------------------------------------------------------------------------------------


def make_profile_figures(profile: Profile) -> Iterator[Figure]:
    """Yield every figure that the arrays of a profile allow."""
    metadata = profile.metadata
    arrays = profile.arrays
    if "mass" in arrays and EVICTED_RATIO in arrays:
        lost = {name: 100 * loss for name, loss in compute_eviction_losses(profile, SHOWN_RATIO).items()}
        named = {f"{name}: {values.sum():.3g} in all": values for name, values in lost.items()}
        title = f"Importance evicted at ratio {SHOWN_RATIO:g}, % of the model's"
        body = make_layer_map(named, metadata.layers, "importance lost, %", "{:.2g}")
        yield Figure("eviction-loss", title, describe_profile(profile), body)
    if "oracle_recall" in arrays:
        curves = {"oracle": arrays["oracle_recall"].mean((0, 1)), metadata.policy.name: arrays["recall"].mean((0, 1))}
        series = tuple(
            Series(name, _read_numbers(np.linspace(0, 100, len(row))), _read_numbers(100 * row))
            for name, row in curves.items()
        )
        title = "Importance kept by the ranking and by the oracle's, mean over heads"
        yield Figure(
            "recall",
            title,
            describe_profile(profile),
            LineChart("share of the context kept, %", "importance kept, %", series),
        )
    if metadata.signals is not None:
        yield from _map_signals(SignalTable(profile))


def _map_signals(table: SignalTable) -> Iterator[Figure]:
    """Yield maps of layers and patterns, a panel for each phase and budget, and entropies by layer."""
    axes = table.axes
    layers = table.profile.metadata.layers
    for measure in select_measures(table):
        panels = {
            f"{phase}, {budget} entries": make_cells(table.measured(measure, phase, budget))
            for phase in axes.phases
            for budget in axes.budgets
        }
        body = HeatMap(tuple(map(str, layers)), table.patterns, "layer", "pattern", measure, panels, "{:.2g}")
        title = f"Signal {measure}: {TITLES[measure]}"
        yield Figure(f"signal-{measure}", title, describe_profile(table.profile), body)


def _read_numbers(values: object) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).tolist())
