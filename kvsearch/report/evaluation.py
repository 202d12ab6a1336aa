"""A comparison of methods as papers print it: a row per method, a column per task or average, a block per size.

Beside the tables: CSV with every number, maps of needles, and layer attention output losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

from kvsearch.core.files import write_atomically
from kvsearch.core.items import group_by_key
from kvsearch.core.printed import format_csv
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import LayerLoss
from kvsearch.evaluation.statistics import MIN_CONTEXTS_FOR_INTERVAL, RETAINED
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.report import table
from kvsearch.report.figures import Figure, HeatMap
from kvsearch.report.plans import describe_shown
from kvsearch.report.table import (
    Cell,
    RowGroup,
    Table,
    describe_coverage,
    format_bounds,
    format_interval,
    format_nats,
    format_outcomes,
    format_percent,
)
from kvsearch.results.evaluation import EvaluationResult, FullScores, ScoreRow, count_tasks_won
from kvsearch.runs.estimates import Estimate

LOSS_COLUMNS = ("layer", "method", "output loss", "bound", "bound by head", "loss / bound", "evicted mass")
INTERVAL = ("mean", "low", "high")
MAX_SCREEN_TASKS = 12  # tasks that a screen has room for
CSV_HEADER = (
    "size", "method", "column", "kind", "questions", "score", "score_low", "score_high", "subject", "difference",
    "difference_low", "difference_high", "wins", "ties", "losses", "entries", "protocol", "phases",
)  # fmt: skip


def make_tables(result: EvaluationResult, *, on_screen: bool = False) -> list[Table]:
    """Return scores by task, differences and what is held; of text the excess loss in place of both.

    On a screen scores have intervals, too, as differences always have; many tasks are shown by their categories.
    """
    by_task = not on_screen or len(result.tasks) <= MAX_SCREEN_TASKS
    losses = [make_nats_table(result, by_task=by_task)] if result.full.nats else []
    if result.on_text:
        return [*losses, make_held_table(result)]
    scores = score_table(result, by_task=by_task, intervals=on_screen)
    traces = [make_trace_table(result)] if result.full.traces else []
    return [scores, *losses, *traces, make_difference_table(result), make_held_table(result)]


def write_tables(result: EvaluationResult, path: Path, overwrite: bool = True) -> None:
    """Write the tables as Markdown or LaTeX, or every number in rows as CSV, by the suffix; see `check_table_file`."""
    table.check_table_file(path)
    if path.suffix == table.CSV:
        text = make_csv_rows(result)
    else:
        render = table.to_markdown if path.suffix == table.MARKDOWN else table.to_latex
        text = "\n".join(map(render, make_tables(result)))
    write_atomically(path, text.encode(), overwrite)


def list_parts(result: EvaluationResult) -> Iterator[Table | Figure]:
    """Yield all tables, maps of needles and output losses where there are any."""
    yield from make_tables(result, on_screen=True)
    for method, grid in (result.needle or {}).items():
        body = HeatMap(
            tuple(f"{depth}%" for depth in grid.depths), tuple(map(str, grid.lengths)), "depth", "tokens", "score",
            {"": grid.scores}, "{:.2f}", scale=(0.0, 1.0),
        )  # fmt: skip
        yield Figure(
            f"needle-{method}",
            f"{method} ({_describe_settings(result)}): needle by depth and length",
            result.model,
            body,
        )
    if result.losses is not None:
        yield make_losses_table(f"{result.model}, phases: {result.phases}", result.protocol, result.losses)


def score_table(result: EvaluationResult, *, by_task: bool = True, intervals: bool = False) -> Table:
    """Return mean scores in percent, by task or by category alone, with 95% intervals or without.

    The best of each block, the full cache aside, is marked where not all tie.
    """
    rows = _select_scored(result, by_task=by_task)

    def cell(score: Estimate, best: str | None = None) -> Cell:
        text = format_percent(score.mean)
        ends = f" {format_bounds(score, '.1f')}" if intervals and not math.isnan(score.low) else ""
        return Cell(text + ends, text == best, score.mean)

    groups = [("", [[Cell(FULL), *(cell(row.of(result.full.scores)) for row in rows)]])]
    for block in result.blocks:
        lines = [[Cell(method.name)] for method in block.methods]
        for row in rows:
            scores = [row.of(method.scores) for method in block.methods]
            texts = {format_percent(score.mean) for score in scores}
            best = max(texts, key=float) if len(texts) > 1 else None  # printed alike, none of them is better
            for line, score in zip(lines, scores, strict=True):
                line.append(cell(score, best))
        groups.append((block.heading, lines))
    few = ", ".join(row.name for row in rows if intervals and math.isnan(row.of(result.full.scores).low))
    short = [f"fewer than {MIN_CONTEXTS_FOR_INTERVAL} contexts: no interval ({few})"] if few else []
    title = f"{result.model}: score in percent{', 95% interval' if intervals else ''} ({_describe_settings(result)})"
    return Table(title, _make_header(result, rows), groups, _list_notes(result, *short), _format_title(result))


def make_nats_table(result: EvaluationResult, *, by_task: bool = True) -> Table:
    """Return the excess losses on text with their differences to the subject, the own loss of the full cache.

    The least of each block is marked where not all tie.
    """
    rows = [row for row in _select_columns(result, by_task=by_task) if row.is_in(result.full.nats)]
    full = [Cell(FULL)]
    for row in rows:
        full += [Cell.nats(row.of(result.full.nats).loss), Cell("")]
    groups = [("", [full])]
    for block in result.blocks:
        lines = [[Cell(method.name)] for method in block.methods]
        for row in rows:
            losses = [row.of(method.nats) for method in block.methods]
            texts = [f"{loss.excess.mean:.4f}" for loss in losses]
            best = min(texts, key=float) if len(set(texts)) > 1 else None
            for line, loss, text in zip(lines, losses, texts, strict=True):
                line += [Cell.nats(loss.excess, best=text == best), Cell.nats(loss.difference, "+")]
        groups.append((block.heading, lines))
    header = ["method"]
    for name in _make_header(result, rows)[1:]:
        header += [name, f"{name} - {result.subject}"]
    title = (
        f"{result.model}: loss above the full cache in nats per token, lower is better (of {FULL}: its own), "
        f"95% interval ({_describe_settings(result)})"
    )
    if not result.on_text:
        return Table(title, header, groups)
    return Table(title, header, groups, _list_notes(result), _format_title(result))


def make_trace_table(result: EvaluationResult) -> Table:
    """Return how many tokens the replies to traced tasks have, and how many are as long as they may be."""

    def line(name: str, method: FullScores) -> list[Cell]:
        cells = [Cell(name)]
        for task in result.full.traces:
            lengths = method.traces[task]
            longer = "" if lengths.longer is None else format_interval(lengths.longer, "+.1f", unit=1)
            cells += [Cell(format_interval(lengths.tokens, ".1f", unit=1), value=lengths.tokens.mean), Cell(longer)]
            cells.append(Cell.number(lengths.at_limit, "d"))
        return cells

    groups = group_lines(result, line)
    header = ["method", *(f"{task}{column}" for task in result.full.traces for column in ("", " - full", " at limit"))]
    return Table(
        f"{result.model}: tokens of a reply, mean, 95% interval ({_describe_settings(result)})", header, groups
    )


def make_difference_table(result: EvaluationResult) -> Table:
    """Return every method minus the subject, in percent, with 95% interval and questions won / tied / lost."""
    rows = _select_scored(result, by_task=False)  # columns are wide
    groups = []
    for block in result.blocks:
        lines = []
        compared = [(FULL, block.full_differences)]
        compared += [(method.name, method.differences) for method in block.methods]
        for name, differences in compared:
            if differences is not None:
                estimates = [row.of(differences) for row in rows]
                cells = [
                    Cell(f"{format_interval(estimate, '+.2f')} {format_outcomes(estimate)}", value=estimate.mean)
                    for estimate in estimates
                ]
                won = count_tasks_won(differences)
                if won is not None:
                    cells.append(Cell(" / ".join(map(str, won.values())), value=won["wins"]))
                lines.append([Cell(name), *cells])
        groups.append((block.heading, lines))
    title = (
        f"{result.model}: paired difference to {result.subject}, in points of 100, 95% interval; questions (and tasks) "
        f"won / tied / lost ({_describe_settings(result)})"
    )
    header = _make_header(result, rows)
    if len(result.tasks) > 1:
        header.append("tasks")
    return Table(title, header, groups)


def make_held_table(result: EvaluationResult) -> Table:
    """Return what every method holds."""
    full = result.full.held

    def line(name: str, method: FullScores) -> list[Cell]:
        held = method.held
        return [
            Cell(name),
            Cell.number(held.entries, ".0f"),
            Cell.number(held.entries / full.entries, ".3f"),
            Cell.number(held.bytes / 1024, ".1f"),
            Cell.number(held.bytes / full.bytes, ".3f"),
            Cell.number(held.most, ".0f"),
        ]

    groups = group_lines(result, line)
    what = "context" if result.protocol == "question-agnostic" else "prompt"
    header = ["method", "entries", "share", "KiB", "share", "most entries while answering"]
    return Table(f"{result.model}: held after the {what}, mean ({_describe_settings(result)})", header, groups)


def group_lines(result: EvaluationResult, line: Callable[[str, FullScores], list[Cell]]) -> list[RowGroup]:
    """Return the lines of a table: of the full cache, then of the methods of every size."""
    full = ("", [line(FULL, result.full)])
    return [
        full,
        *((block.heading, [line(method.name, method) for method in block.methods]) for block in result.blocks),
    ]


def make_csv_rows(result: EvaluationResult) -> str:
    """Return a row per size, method and column; scores in [0, 1], differences to the subject at the same size.

    Tokens of replies and losses on text in nats per token are rows, too, with differences to the full cache.
    """
    lines: list[Sequence[object]] = [CSV_HEADER]
    for block in result.blocks:
        size = "" if block.size is None else str(block.size)
        methods = [(FULL, result.full, block.full_differences)]
        methods += [(method.name, method, method.differences) for method in block.methods]
        for name, scored, differences in methods:
            settings = (scored.held.entries, result.protocol, result.phases)
            for row in result.rows:
                score = [getattr(row.of(scored.scores), end) for end in INTERVAL]
                lead = None if differences is None else row.of(differences)
                compared = [getattr(lead, end, "") for end in (*INTERVAL, "wins", "ties", "losses")]
                named = (size, name, row.name, row.kind, row.questions)
                lines.append([*named, *score, result.subject, *compared, *settings])
            for task, length in scored.traces.items():
                score = [getattr(length.tokens, end) for end in INTERVAL]
                compared = [getattr(length.longer, end, "") for end in INTERVAL]
                lines.append([size, name, task, "tokens", "", *score, FULL, *compared, "", "", "", *settings])
            for row in result.rows:
                if row.is_in(scored.nats):
                    losses = row.of(scored.nats)
                    score = [getattr(losses.loss, end) for end in INTERVAL]
                    for subject, more in {result.subject: losses.difference, FULL: losses.excess}.items():
                        if more is not None:
                            compared = [getattr(more, end) for end in INTERVAL]
                            what = (size, name, row.name, "nats", row.questions)
                            lines.append([*what, *score, subject, *compared, "", "", "", *settings])
    return format_csv(lines)


def make_losses_table(model: str, protocol: Protocol, losses: Sequence[LayerLoss]) -> Table:
    """Return output losses per layer and method, plain means over the tasks."""
    follows = "question and answer" if protocol == QUESTION_AGNOSTIC else "the answer"
    tasks = len({row.task for row in losses})
    notes = [
        f"mean over the tokens of {follows}, teacher-forced with every other layer undisturbed"
        + (f"; then over {tasks} tasks" if tasks > 1 else ""),
        "bound: 2 C times the sum over query heads of evicted mass times largest |v|_1; by head: each with its own C",
        "layers differ in scale: losses of different layers do not add up",
    ]
    if any(row.bound is None for row in losses):
        notes.append("no bound: the method merges entries, the bound is about keys and values that stay as they are")
    groups = []
    for _, rows in groupby(average_over_tasks(losses), lambda row: row.layer):
        lines = [
            [
                Cell(str(row.layer)), Cell(row.method), Cell.number(row.loss, ".4g"), Cell.number(row.bound, ".4g"),
                Cell.number(row.bound_by_head, ".4g"), Cell.number(row.ratio, ".3f"),
                Cell.number(row.evicted_mass, ".4f"),
            ]
            for row in rows
        ]  # fmt: skip
        groups.append(("", lines))
    title = f"{model}: layer attention output loss, L1 ({protocol})"
    return Table(title, LOSS_COLUMNS, groups, tuple(notes), words=("method",))


def average_over_tasks(losses: Sequence[LayerLoss]) -> list[LayerLoss]:
    """Join the rows of each layer and method to one, in which every task has the same weight; layers ascending."""
    groups = group_by_key(losses, lambda row: (row.layer, row.method))
    return [
        replace(
            rows[0],
            task=", ".join(row.task for row in rows),
            queries=sum(row.queries for row in rows),
            loss=fmean(row.loss for row in rows),
            evicted_mass=fmean(row.evicted_mass for row in rows),
            bound=_compute_mean(row.bound for row in rows),
            bound_by_head=_compute_mean(row.bound_by_head for row in rows),
        )
        for _, rows in sorted(groups.items(), key=lambda group: group[0][0])
    ]


def _compute_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _list_notes(result: EvaluationResult, *notes: str) -> tuple[str, ...]:
    """Return what stands below the first table, with notes of its own."""
    plans = list[str]()
    if result.blocks[0].size is None:
        if result.blocks[0].method("uniform") is not None:
            plans.append(f"uniform: the policy of {result.subject} with even budgets")
        plans.append("all methods but full hold as many entries as the plan")
    together = " (all plans together)" if len(result.guarantees) > 1 else ""
    for name, shown in result.guarantees.items():
        verdict = ""
        if shown.wished is not None:
            verdict = f": at most {100 * shown.wished:g} points is {'shown' if shown.holds else 'not shown'}"
        plans.append(f"{name} {describe_shown(shown.guarantee)}{together}{verdict}")
    return (*plans, *notes, *result.notes)


def _format_title(result: EvaluationResult) -> tuple[str, ...]:
    return () if result.different is None else (result.different,)


def _describe_settings(result: EvaluationResult) -> str:
    drawn = result.sampling
    how = ""
    if drawn is not None:
        how = f", temperature {drawn.temperature:g}, top-p {drawn.top_p:g}, replies to each: {drawn.replies}"
    return f"{result.protocol}, phases: {result.phases}{how}, {describe_coverage(result.tasks)}"


def _select_columns(result: EvaluationResult, *, by_task: bool) -> list[ScoreRow]:
    """Return which rows of scores become columns, averages first; tasks only if `by_task`.

    Of averages over the same tasks that is the first, of one task the task itself and its categories.
    """
    if len(result.tasks) == 1:
        first, *others = result.rows
        return [first, *(row for row in others if row.kind == "category" or row.name == RETAINED)]
    seen = set[frozenset[str]]()
    chosen = []
    for row in result.rows:
        if row.kind == "average" and row.name != RETAINED:
            tasks = frozenset(result.averages[row.name])
            if tasks in seen:
                continue
            seen.add(tasks)
        if by_task or row.kind != "task":
            chosen.append(row)
    return sorted(chosen, key=lambda row: row.kind != "average")  # which a narrow screen then has beside the names


def _select_scored(result: EvaluationResult, *, by_task: bool) -> list[ScoreRow]:
    """Return the columns of percent: those that are not of text alone."""
    return [row for row in _select_columns(result, by_task=by_task) if not row.is_in(result.full.nats)]


def _make_header(result: EvaluationResult, rows: Sequence[ScoreRow]) -> list[str]:
    """Return the headings of columns; averages over the same tasks share one."""
    header = ["method"]
    for row in rows:
        if row.kind == "average" and row.name != RETAINED:
            tasks = set(result.averages[row.name])
            same = (name for name, others in result.averages.items() if set(others) == tasks and name != RETAINED)
            header.append(" = ".join(same))
        else:
            header.append(row.name)
    return header


def describe_best(result: EvaluationResult) -> str:
    """Say which method scores highest at each size, or has the least excess loss on text."""
    choose = min if result.on_text else max
    said = []
    for block in result.blocks:
        best = choose(block.methods, key=lambda method: result.measured(method).mean)
        value = result.measured(best)
        size = f"{block.heading}: " if block.size else ""
        said.append(f"{size}{best.name} {format_nats(value) if result.on_text else format_interval(value, '.1f')}")
    listed = "; ".join(said)
    if result.on_text:
        full = format_nats(result.overall.of(result.full.nats).loss)
        return f"least loss above the full cache: {listed} nats per token; full cache itself {full}"
    return f"highest scores: {listed}; full cache {format_interval(result.measured(result.full), '.1f')}"
