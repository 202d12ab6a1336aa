"""Figures of results: score against entries, intervals, losses by layer, costs of caches, and how a search went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from kvsearch.evaluation.values import LayerLoss
from kvsearch.report.costs import SpeedView
from kvsearch.report.evaluation import task_means
from kvsearch.report.figures.data import Axis, Figure, Intervals, LineChart, Series
from kvsearch.report.numbers import asked, asked_words
from kvsearch.report.selections import best_first
from kvsearch.results.evaluation import EvaluationResult, HeadroomResult, ScoreRow
from kvsearch.results.search import AnySearch, StoredSearch, Trace
from kvsearch.results.selection import SelectionResult
from kvsearch.results.text_perplexity import PerplexityResult
from kvsearch.results.validation import ValidationResult
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import EVOLVED, EXPANDED, FULL

SCORE = Axis("score, %")
HELD = "entries held, all layers and kv heads"
FEW = 6  # tasks that have a figure each
WIDE = 20.0  # from this largest over smallest value on, a scale is logarithmic
Point = tuple[float, Estimate]


def score_figures(result: EvaluationResult) -> Iterator[Figure]:
    """Yield scores against entries over all tasks and by task, and output losses by layer."""
    how = f"{result.model}: {result.protocol}, {result.phases}, {asked_words(result.tasks)}; 95% intervals"
    tasks = [row for row in result.rows if row.kind == "task"]
    what = "mean over tasks" if len(tasks) > 1 else tasks[0].name
    yield _score_figure(result, result.overall, "scores", what, how)
    if 1 < len(tasks) <= FEW:
        for row in tasks:
            yield _score_figure(result, row, f"scores-{row.name}", row.name, how)
    if result.losses:
        yield _losses(result.model, result.losses)


def _score_figure(result: EvaluationResult, row: ScoreRow, name: str, what: str, caption: str) -> Figure:
    body = LineChart(Axis(HELD, log=True), SCORE, tuple(_by_method(result, row)))
    return Figure(name, f"Score against entries held: {what}", caption, body)


def _by_method(result: EvaluationResult, row: ScoreRow) -> Iterator[Series]:
    """Yield the full cache as a level, then a line per method over its sizes."""
    yield level(FULL, row.of(result.full.scores))
    points: dict[str, list[Point]] = {}
    for block in result.blocks:
        for method in block.methods:
            points.setdefault(method.name, []).append((method.held.entries, row.of(method.scores)))
    yield from (measured(name, found) for name, found in points.items())


def measured(name: str, found: Iterable[Point], muted: bool = False) -> Series:
    """Return a line of scores in percent with their intervals, by what they are drawn over."""
    points = sorted(found, key=lambda one: one[0])
    y, low, high = (tuple(100 * getattr(score, end) for _, score in points) for end in ("mean", "low", "high"))
    return Series(name, tuple(x for x, _ in points), y, low, high, muted=muted)


def level(name: str, score: Estimate) -> Series:
    """Return a horizontal line at a score in percent."""
    return Series(name, (), (100 * score.mean,), (100 * score.low,), (100 * score.high,), "level", muted=True)


def _losses(model: str, losses: Sequence[LayerLoss]) -> Figure:
    rows = task_means(losses)
    methods = dict.fromkeys(row.method for row in rows)
    series = tuple(
        _line(name, [(float(row.layer), row.loss) for row in rows if row.method == name]) for name in methods
    )
    body = LineChart(Axis("layer"), Axis("output loss, L1", log=all(y > 0 for one in series for y in one.y)), series)
    caption = f"{model}: teacher-forced, every other layer undisturbed; layers differ in scale"
    return Figure("output-losses", "What the attention output of each layer loses", caption, body)


def headroom_figures(found: HeadroomResult) -> Iterator[Figure]:
    """Yield the scores of all methods in every row, the best first."""
    groups = tuple((row.task, tuple(best_first(row.scores))) for row in found.rows)
    title = f"Score with {100 * found.ratio:g}% evicted"
    body = Intervals(SCORE, groups, has_zero=False)
    yield Figure("headroom", title, f"{found.model}: {asked_words(found.asked)}", body)


def perplexity_figures(found: PerplexityResult) -> Iterator[Figure]:
    """Yield what every method loses more than the full cache."""
    about = found.perplexity
    rows = [(name, method.difference) for name, method in about.rows]
    means = tuple((name, difference) for name, difference in rows if difference is not None)
    caption = (
        f"{about.model}: {about.text}, {about.windows} windows of {about.context} + {about.continuation} tokens, "
        f"phases: {found.phases}; 95% intervals"
    )
    body = Intervals(Axis("nats per token, minus the full cache"), (("", means),), unit=1)
    yield Figure("perplexity", "What is lost on the continuation of compressed contexts", caption, body)


def report_figure(name: str, size: str, caption: str, heading: str, scores: Mapping[str, Estimate]) -> Figure:
    """Return the scores of the report split, the best first, under a heading that says which of them was taken."""
    body = Intervals(SCORE, ((heading, tuple(best_first(scores))),), has_zero=False)
    return Figure(name, f"Report split at {size}", caption, body)


def selection_figures(found: Sequence[SelectionResult]) -> Iterator[Figure]:
    """Yield the report split at every size: what was chosen beside all that it is compared with."""
    several = len(found) > 1
    for one in found:
        caption = f"{one.model}: {one.protocol}, {one.chosen.phases}, {asked(one.report.asked)}; 95% intervals"
        stem = f"report-{one.size}" if several else "report"
        yield report_figure(stem, one.size.words, caption, f"written: {one.chosen.written}", one.report.scores)
    if several:
        shared = set.intersection(*(set(one.report.scores) for one in found)) - {FULL}
        lines = [measured("written", [_at(one, one.chosen.written) for one in found])]
        lines += [measured(name, [_at(one, name) for one in found]) for name in sorted(shared)]
        full = level(FULL, found[0].report.scores[FULL])
        body = LineChart(Axis(HELD, log=True), SCORE, (full, *lines))
        yield Figure("report", "Report split: score against entries held", found[0].model, body)


def _at(one: SelectionResult, name: str) -> Point:
    return one.report.held[name].entries, one.report.scores[name]


def validation_figures(found: ValidationResult) -> Iterator[Figure]:
    """Yield what every signal gains on its controls, at every size."""
    questions = sum(task.questions for task in found.tasks.values())
    for at in found.budgets:
        groups = tuple(
            (
                f"{judged.words}: {judged.verdict}",
                tuple((f"minus {name}", getattr(judged.gains, name)) for name in ("inverse", "uniform", "random")),
            )
            for judged in at.signals
        )
        caption = f"{found.model.name}: {found.protocol}, {questions} questions, split {found.split}; 95% intervals"
        stem = f"verdicts-{at.budget:g}" if at.ratio is None else f"verdicts-ratio-{at.ratio:g}"
        title = f"What signals gain on their controls at {at.size}"
        yield Figure(stem, title, caption, Intervals(Axis("paired difference, points"), groups))


def speed_figures(view: SpeedView) -> Iterator[Figure]:
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
            lines: dict[str, list[tuple[float, float]]] = {}
            for costs, value in zip(costs_at, values, strict=True):
                lines.setdefault(costs.cache, []).append((getattr(costs, name), value))
            series = tuple(_line(cache, sorted(points)) for cache, points in lines.items())
            body = LineChart(Axis(label, log=True), Axis(unit), series)
            yield Figure(f"{stem}-over-{name}", f"{title}, {fixed} {largest:,}", view.measured(), body)


def _line(name: str, points: Sequence[tuple[float, float]]) -> Series:
    x = tuple(x for x, _ in points)
    y = tuple(y for _, y in points)
    return Series(name, x, y, style="line" if len(points) > 1 else "points")


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
