"""Figures of what was answered: score against entries, the front of both, intervals, and losses by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvsearch.choose.selection import SelectionResult
from kvsearch.choose.verdicts import Validation
from kvsearch.evaluation.layer_loss import LayerLoss
from kvsearch.evaluation.statistics import Row
from kvsearch.report.asked import asked_words
from kvsearch.report.evaluation import Compared
from kvsearch.report.figures.data import Axis, Estimated, Figure, Intervals, Lines, Series
from kvsearch.report.losses import task_means
from kvsearch.report.numbers import Interval
from kvsearch.report.selection import asked, best_first
from kvsearch.runs.estimates import Estimate
from kvsearch.strategies.names import FULL

SCORE = Axis("score, %")
HELD = "entries held, all layers and kv heads"
FEW = 6  # tasks that have a figure each
Point = tuple[float, Interval]


def score_figures(result: Compared, losses: Sequence[LayerLoss] | None = None) -> Iterator[Figure]:
    """Yield scores against entries over all tasks and by task, the front of these, and output losses by layer."""
    how = f"{result.model}: {result.protocol}, {result.phases}, {asked_words(result.coverage)}; 95% intervals"
    rows = result.blocks[0].rows
    tasks = [at for at, row in enumerate(rows) if row.kind == "task"]
    whole = rows.index(result.blocks[0].overall)
    for at in [whole, *(tasks if 1 < len(tasks) <= FEW else ())]:
        name = "scores" if at == whole else f"scores-{rows[at].task}"
        what = "mean over tasks" if at == whole and len(tasks) > 1 else rows[tasks[0] if at == whole else at].task
        body = Lines(Axis(HELD, log=True), SCORE, tuple(_by_method(result, at)))
        yield Figure(name, f"Score against entries held: {what}", how, body)
    if (front := _front(result, whole)) is not None:
        yield Figure("front", "What no other method beats in both score and entries", how, front)
    if losses:
        yield _losses(result.model, losses)


def _by_method(result: Compared, at: int) -> Iterator[Series]:
    """Yield the full cache as a level, then a line per method over its sizes."""
    yield level(FULL, result.blocks[0].rows[at].scores[FULL])
    points: dict[str, list[Point]] = {}
    for block in result.blocks:
        for name, label in block.methods.items():
            points.setdefault(name, []).append((result.held[label].entries, block.rows[at].scores[label]))
    yield from (measured(name, found) for name, found in points.items())


def measured(name: str, found: Iterable[Point], muted: bool = False) -> Series:
    """Return a line of scores in percent with their intervals, by what they are drawn over."""
    points = sorted(found, key=lambda one: one[0])
    y, low, high = ([100 * getattr(score, end) for _, score in points] for end in ("mean", "low", "high"))
    return Series(name, tuple(x for x, _ in points), tuple(y), tuple(low), tuple(high), muted=muted)


def level(name: str, score: Interval) -> Series:
    """Return a horizontal line at a score in percent."""
    return Series(name, (), (100 * score.mean,), (100 * score.low,), (100 * score.high,), "level", muted=True)


def _front(result: Compared, at: int) -> Lines | None:
    """Return all methods as points and the best score up to each number of entries as steps; None of few points."""
    points = [
        (result.held[label].entries, 100 * block.rows[at].scores[label].mean, name)
        for block in result.blocks
        for name, label in block.methods.items()
    ]
    if len(points) < 3:
        return None
    best, steps = -1.0, list[tuple[float, float]]()
    for x, y, _ in sorted(points, key=lambda one: (one[0], -one[1])):
        if y > best:
            best = y
            steps.append((x, y))
    front = Series("front", tuple(x for x, _ in steps), tuple(y for _, y in steps), style="steps", muted=True)
    methods = dict.fromkeys(name for *_, name in points)
    mine = {name: [(x, y) for x, y, other in points if other == name] for name in methods}
    dots = (Series(n, tuple(x for x, _ in xy), tuple(y for _, y in xy), style="points") for n, xy in mine.items())
    return Lines(Axis(HELD, log=True), SCORE, (front, *dots))


def _losses(model: str, losses: Sequence[LayerLoss]) -> Figure:
    rows = task_means(losses)
    methods = dict.fromkeys(row.method for row in rows)
    series = tuple(
        Series(name, tuple(float(row.layer) for row in mine), tuple(row.loss for row in mine))
        for name, mine in ((name, [row for row in rows if row.method == name]) for name in methods)
    )
    body = Lines(Axis("layer"), Axis("output loss, L1", log=all(y > 0 for one in series for y in one.y)), series)
    caption = f"{model}: teacher-forced, every other layer undisturbed; layers differ in scale"
    return Figure("output-losses", "What the attention output of each layer loses", caption, body)


def row_figure(name: str, title: str, caption: str, rows: Iterable[Row]) -> Figure:
    """Return the scores of all methods in every row, the best first."""
    groups = tuple((row.task, estimated(row.scores)) for row in rows)
    return Figure(name, title, caption, Intervals(SCORE, groups, None))


def selection_figures(found: Sequence[SelectionResult]) -> Iterator[Figure]:
    """Yield the report split at every size: what was chosen beside all that it is compared with."""
    several = len(found) > 1
    for one in found:
        report, chosen = one.report, one.chosen
        caption = f"{one.model}: {one.protocol}, {chosen.phases}, {asked(report.asked)}; 95% intervals"
        body = Intervals(SCORE, ((f"written: {chosen.written}", estimated(report.scores)),), None)
        stem = f"report-{one.size}" if several else "report"
        yield Figure(stem, f"Report split at {one.size.words}", caption, body)
    if several:
        shared = set.intersection(*(set(one.report.scores) for one in found)) - {FULL}
        lines = [measured("written", [_at(one, one.chosen.written) for one in found])]
        lines += [measured(name, [_at(one, name) for one in found]) for name in sorted(shared)]
        full = level(FULL, found[0].report.scores[FULL])
        body_of_lines = Lines(Axis(HELD, log=True), SCORE, (full, *lines))
        yield Figure("report", "Report split: score against entries held", f"{found[0].model}", body_of_lines)


def _at(one: SelectionResult, name: str) -> Point:
    return one.report.held[name].entries, one.report.scores[name]


def validation_figures(found: Validation) -> Iterator[Figure]:
    """Yield what every signal gains on its controls, at every size."""
    questions = sum(task.questions for task in found.tasks.values())
    for at in found.budgets:
        groups = tuple(
            (
                f"{judged.words}: {judged.verdict}",
                tuple(
                    Estimated(f"minus {control}", *_percents(getattr(judged.gains, control)))
                    for control in ("inverse", "uniform", "random")
                ),
            )
            for judged in at.signals
        )
        caption = f"{found.model.name}: {found.protocol}, {questions} questions, split {found.split}; 95% intervals"
        stem = f"verdicts-{at.budget:g}" if at.ratio is None else f"verdicts-ratio-{at.ratio:g}"
        title = f"What signals gain on their controls at {at.size}"
        yield Figure(stem, title, caption, Intervals(Axis("paired difference, points"), groups))


def estimated(scores: Mapping[str, Estimate]) -> tuple[Estimated, ...]:
    """Return scores in percent, the full cache first, then the best."""
    return tuple(Estimated(name, *_percents(score)) for name, score in best_first(scores))


def _percents(found: Interval) -> tuple[float, float, float]:
    return 100 * found.mean, 100 * found.low, 100 * found.high
