"""A paper's table made again: its cells beside the paper's numbers, from what its stages have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from kvsearch.budgets.lukv import MarginalSolver, solve_exactly
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.calibration.analysis import compute_lost_mass, measure_stability
from kvsearch.core.arrays import Floats
from kvsearch.core.items import group_by_key
from kvsearch.core.printed import format_csv, pluralize
from kvsearch.evaluation.names import FULL
from kvsearch.papers.tables import PAPER_TABLES, PaperTable, Stage, find_table, model_of, numbers
from kvsearch.plan import Plan, Profile
from kvsearch.report.profile import BUDGETS_SHOWN
from kvsearch.report.table import Cell, Table
from kvsearch.results import Result
from kvsearch.results.evaluation import SECTIONS, EvaluationResult, MethodScores, ScoreRow, SizeScores
from kvsearch.runs.estimates import Estimate
from kvsearch.selection.records import REPORTED_STRATEGIES
from kvsearch.signals.table import SignalTable

PAPER_COLUMN = "paper"
LEFT_OUT = "left out"
CELL_CSV_HEADER = ("table", "block", "row", "column", "value", "low", "high", "text", "paper")
AVERAGE_COLUMN = "average"
FULL_CACHE_LABEL = "Full"
SIGNAL_HEADINGS = {"route": "Eviction", "budgets": "Budget allocation"}
SPLIT_OF_STAGE = {"evolve": "train", "select": "select, then report", "validate": "select"}
OTHER_TASKS = "other tasks than the paper's are asked: beside them are its numbers of single tasks alone"


@dataclass(frozen=True)
class MeasuredCell:
    """A cell: a value in points of 100 (or as its column says) with its 95% interval, or a text in its place.

    `block` is the heading that it is under; `key` is what the file of the paper's numbers calls that. Of `ranked` ones
    the highest of a column and block is marked.
    """

    row: str
    column: str
    value: float | None
    block: str = ""
    key: str = ""
    low: float | None = None
    high: float | None = None
    text: str = ""
    paper: float | None = None
    ranked: bool = False

    @property
    def shown(self) -> str:
        """The cell as it is printed."""
        return self.text or Cell.number(self.value, ".2f").text


class ReproducedTable(Result):
    """The cells of a table, what stands above and below it, what it was made of, and its files once it is written."""

    SCHEMA: ClassVar[str] = "kvsearch.reproduction/1"

    table: str
    title: str
    caption: tuple[str, ...]
    notes: tuple[str, ...]
    model: str
    options: dict[str, Any]
    stages: tuple[dict[str, Any], ...]
    cells: tuple[MeasuredCell, ...]
    files: tuple[Path, ...] = Field(default=(), exclude=True)

    def tables(self) -> list[Table]:
        """Return a table for all blocks that have columns in common, in which a row of the paper's follows every row.

        It has the caption of the first block and the notes of the last.
        """
        parts: list[dict[str, list[MeasuredCell]]] = []  # cells by block
        for block, cells in group_by_key(self.cells, lambda cell: cell.block).items():
            before = {cell.column for cells in (parts[-1] if parts else {}).values() for cell in cells}
            if before.isdisjoint(cell.column for cell in cells):
                parts.append({})
            parts[-1][block] = cells
        tables = list[Table]()
        for part in parts:
            columns = list(dict.fromkeys(cell.column for cells in part.values() for cell in cells))
            groups = [(block, list(self._rows(cells, columns))) for block, cells in part.items()]
            title = f"{self.title} (continued)" if tables else self.title
            notes = self.notes if part is parts[-1] else ()
            tables.append(Table(title, ["", *columns], groups, notes, () if tables else self.caption))
        return tables

    def _rows(self, cells: Sequence[MeasuredCell], columns: Sequence[str]) -> Iterator[list[Cell]]:
        best: dict[str, str] = {}  # how the highest of a column is printed, where not all are printed alike
        for column in columns:
            rivals = [cell for cell in cells if cell.ranked and cell.column == column and cell.value is not None]
            if len({cell.shown for cell in rivals}) > 1:
                best[column] = max(rivals, key=lambda cell: cell.value or 0.0).shown
        for row, known in group_by_key(cells, lambda cell: cell.row).items():
            by_column = {cell.column: cell for cell in known}
            texts = {column: by_column[column].shown if column in by_column else "" for column in columns}
            ranked = {column for column, cell in by_column.items() if cell.ranked}
            yield [
                Cell(row),
                *(Cell(text, column in ranked and text == best.get(column)) for column, text in texts.items()),
            ]
            if any(cell.paper is not None for cell in by_column.values()):
                beside = (by_column[column].paper if column in by_column else None for column in columns)
                yield [
                    Cell(f"{row}, {PAPER_COLUMN}"),
                    *(Cell("" if value is None else f"{value:.2f}") for value in beside),
                ]

    def csv(self) -> str:
        """Return a line per cell."""
        rows = [
            (self.table, cell.block, cell.row, cell.column, cell.value, cell.low, cell.high, cell.text, cell.paper)
            for cell in self.cells
        ]
        return format_csv([CELL_CSV_HEADER, *rows])


def list_tables(name: str = "") -> Table:
    """Return which tables of papers there are; or one of them, below it what is not as in the paper.

    Raises:
        UsageError: there is no table of that name.
    """
    tables = [find_table(name)] if name else list(PAPER_TABLES.values())
    notes: list[str] = []
    if name:
        (table,) = tables
        notes += [f"not as in the paper: {change}" for change in table.changed]
        notes += [f"smaller for the bundled models: {change}" for change in table.smaller]
        notes.append(f"numbers of the paper beside: {len(numbers(table.name)) or 'none'}")
    rows = [
        (table.name, f"{table.source}, {table.where}", table.shows, ", ".join(dict.fromkeys(table.models.values())))
        for table in tables
    ]
    columns = ("name", "in the paper", "shows", "models")
    return Table.plain("tables of kvsearch reproduce", columns, rows, words=columns, notes=tuple(notes))


def make_reproduced_table(
    table: PaperTable, stages: Sequence[Stage], content: Mapping[str, Any], *, short: bool, own_tasks: bool
) -> ReproducedTable:
    """Make a paper's table from the results of its stages; `content` is the run's content: model, options, stages.

    `short` says that it is the short form, `own_tasks` that the user chose the tasks: means over these are not beside
    the paper's.
    """
    model = content["model"]
    named = model_of(table, model)
    printed = numbers(table.name)
    if own_tasks:
        of_tasks = table.view == "scores" and "tasks.*" in table.columns
        printed = {key: value for key, value in printed.items() if of_tasks and key[-1] != AVERAGE_COLUMN}
    cells = tuple(
        replace(cell, paper=printed.get((named or "", cell.key, cell.row, cell.column)))
        for cell in VIEWS[table.view](table, stages)
    )
    notes = [*_list_notes(table, stages), *(f"not as in the paper: {change}" for change in table.changed)]
    if short:
        notes += [f"made smaller: {change}" for change in table.smaller]
    if any(cell.paper is not None for cell in cells):
        notes.append(f"rows with 'paper' are the paper's numbers for {named}, on its own samples")
    elif named is None:
        notes.append(f"without the paper's numbers: {model} is none of its models ({', '.join(table.models)})")
    else:
        notes.append("without the paper's numbers: they are in a figure, or cannot be read from its text beyond doubt")
    if own_tasks and named:
        notes.append(OTHER_TASKS)
    title = f"{table.source}, {table.where}, on {model}: {table.shows}"
    settings = dict.fromkeys(", ".join(_describe_stage(stage)) for stage in stages if "tasks" in stage.options)
    return ReproducedTable(
        table=table.name, title=title, caption=tuple(settings), notes=tuple(notes), cells=cells, **content
    )


def _describe_stage(stage: Stage) -> Iterator[str]:
    """Describe the tasks, samples and split of a search, evaluation or selection."""
    from kvsearch.tasks.catalog import describe_tasks

    options = stage.options
    what = "searched" if stage.job == "evolve" else stage.block or "asked"
    length = f" of {', '.join(f'{tokens:,}' for tokens in options['length'])} tokens" if "length" in options else ""
    yield f"{what}: {options['tasks']}, {pluralize(options['samples'], 'context')} of a task{length}"
    default = " and ".join(sorted({task.split for task in describe_tasks(options["tasks"])}))
    yield f"split {SPLIT_OF_STAGE.get(stage.job) or options.get('split') or default}"
    yield options["protocol"]
    if stage.job == "evaluate":
        tasks = stage.result.tasks
        yield f"evicting in {stage.result.phases}"
        contexts = pluralize(sum(task.contexts for task in tasks), "context")
        yield f"{contexts} with {pluralize(sum(task.questions for task in tasks), 'question')}"


def _list_notes(table: PaperTable, stages: Sequence[Stage]) -> Iterator[str]:
    """Say what is left out, and what stages say of their own results."""
    for stage in stages:
        yield from stage.remarks
        yield from (f"{table.rows.get(name, name)} is left out: {why}" for name, why in stage.left_out.items())
        if stage.job == "select" and stage.result.chosen.winner is None:
            name = stage.result.chosen.written
            yield f"{stage.block}: no strategy beats the best single policy beyond doubt, the plan is {name}"
        if stage.job == "evaluate":
            yield from stage.result.notes
            yield from filter(None, [stage.result.different])


def _select_stages(stages: Sequence[Stage], job: str) -> list[Stage]:
    """Return the stages of a job."""
    return [stage for stage in stages if stage.job == job]


# --- scores of evaluations --------------------------------------------------------------------------------------------


def _list_sizes(
    table: PaperTable, stages: Sequence[Stage]
) -> Iterator[tuple[Stage, SizeScores, dict[str, MethodScores]]]:
    """Yield every evaluation with its scores, size by size, and the scores of the rows' methods that it has."""
    for stage in _select_stages(stages, "evaluate"):
        for sized in stage.result.blocks:
            methods = {row: sized.method(row.format(size=sized.size, block=stage.block)) for row in table.rows}
            yield stage, sized, {row: method for row, method in methods.items() if method is not None}


def _read_scores(
    table: PaperTable, stage: Stage, methods: Mapping[str, MethodScores]
) -> dict[str, dict[str, Estimate]]:
    """Return the scores of rows at one size, by column."""
    columns = _select_columns(table, stage.result)
    return {
        row: {column: score.of(method.scores) for column, score in columns.items()} for row, method in methods.items()
    }


def _find_best_baseline(scores: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Return the row without a plan of its own that scores highest."""
    return max((row for row in scores if "{" not in row), key=lambda row: scores[row][AVERAGE_COLUMN].mean)


def _select_columns(table: PaperTable, result: EvaluationResult) -> dict[str, ScoreRow]:
    """Return the scores that are columns.

    "tasks.*" are all tasks in their order; of several paths with | between them the first is taken that is there.
    """
    columns: dict[str, ScoreRow] = {}
    for paths in table.columns:
        for section, _, name in (path.partition(".") for path in paths.split("|")):
            rows = [row for row in result.rows if SECTIONS[row.kind] == section and name in ("*", row.name)]
            if rows:
                columns |= {row.name if name == "*" else AVERAGE_COLUMN: row for row in rows}
                break
    return columns


def _make_share_cell(
    row: str, column: str, share: Estimate, block: str = "", key: str = "", **details: Any
) -> MeasuredCell:
    """Return a cell of a share, in points of 100."""
    mean, low, high = (100 * end if end == end else None for end in (share.mean, share.low, share.high))
    return MeasuredCell(row, column, mean, block, key or block, low, high, **details)


def list_scores(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield the scores of the full cache, then of all rows at all sizes."""
    for stage, sized, methods in _list_sizes(table, stages):
        block = stage.block
        heading = ", ".join(filter(None, (block, sized.heading)))
        key = f"{block} {sized.size}".strip()
        if sized is stage.result.blocks[0]:
            for column, score in _select_columns(table, stage.result).items():
                yield _make_share_cell(FULL_CACHE_LABEL, column, score.of(stage.result.full.scores), block)
        measured = _read_scores(table, stage, methods)
        for row, label in table.rows.items():
            if row in stage.left_out:
                yield MeasuredCell(label, AVERAGE_COLUMN, None, heading, text=LEFT_OUT)
            for column, share in measured.get(row, {}).items():
                yield _make_share_cell(label, column, share, heading, key, ranked=True)


def compare_with_best(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield PolyKV's Table 2: the best single policy, strategies, and the better one's lead."""
    for stage, sized, methods in _list_sizes(table, stages):
        size = str(sized.size)
        measured = _read_scores(table, stage, methods)
        mean = {row: 100 * columns[AVERAGE_COLUMN].mean for row, columns in measured.items()}
        best = _find_best_baseline(measured)
        strategies = [row for row in measured if "{" in row]
        full = _select_columns(table, stage.result)[AVERAGE_COLUMN].of(stage.result.full.scores)
        yield MeasuredCell(size, FULL_CACHE_LABEL, 100 * full.mean, key=size)
        yield MeasuredCell(size, "Baseline", mean[best], key=size, text=f"{mean[best]:.2f} ({table.rows[best]})")
        yield from (MeasuredCell(size, table.rows[row], mean[row], key=size) for row in strategies)
        if strategies:
            lead = max(mean[row] for row in strategies) - mean[best]
            yield MeasuredCell(size, "delta", lead, key=size, text=f"{lead:+.2f}")


def compare_by_category(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield PolyKV's Table 4: the strategy minus the best single policy, by category."""
    for stage, _, methods in _list_sizes(table, stages):
        measured = _read_scores(table, stage, methods)
        best = _find_best_baseline(measured)
        strategy = next(row for row in measured if "{" in row)
        for column, share in measured[strategy].items():
            lead = 100 * (share.mean - measured[best][column].mean)
            heading = f"{stage.block}: minus {table.rows[best]}"
            yield MeasuredCell(column, "delta", lead, heading, stage.block, text=f"{lead:+.2f}")


# --- selections, signals, plans, losses -------------------------------------------------------------------------------


def list_selections(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:  # noqa: ARG001
    """Yield PolyKV's Table 1, a row per benchmark: all scores are of split report."""
    for stage in _select_stages(stages, "select"):
        row = stage.block
        outcome = stage.result.chosen
        best = outcome.best
        mean = {name: 100 * score.mean for name, score in stage.result.report.scores.items()}
        yield MeasuredCell(row, "FullKV", mean[FULL], key=row)
        yield MeasuredCell(row, "Best baseline", mean[best], key=row, text=f"{mean[best]:.2f} ({best})")
        if outcome.leader is None:
            yield MeasuredCell(row, "PolyKV Top-1", None, key=row, text="no candidate")
            continue
        top = outcome.leader.name
        spread = [
            mean[method.name]
            for method in outcome.list_foremost("candidate", REPORTED_STRATEGIES)
            if method.name in mean
        ]
        lead = mean[top] - mean[best]
        yield MeasuredCell(row, "PolyKV Top-1", mean[top], key=row, text=f"{mean[top]:.2f} ({top})")
        yield MeasuredCell(row, "Top-5 range", None, key=row, text=f"{min(spread):.2f} to {max(spread):.2f}")
        yield MeasuredCell(row, "delta", lead, key=row, text=f"{lead:+.2f}")
        yield MeasuredCell(row, "accepted", None, key=row, text=outcome.verdict)


def list_signals(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield PolyKV's Table 3: forward, inverse and their difference, of all that the last validation has judged."""
    validations = _select_stages(stages, "validate")[-1:]
    for signal in (signal for stage in validations for at in stage.result.budgets for signal in at.signals):
        row = f"{table.rows.get(signal.signal, signal.signal)}, {signal.phases}"
        heading = SIGNAL_HEADINGS[signal.kind]
        gain = signal.gains.inverse
        yield _make_share_cell(row, "Fwd.", signal.forward, heading)
        yield _make_share_cell(row, "Inv.", signal.inverse, heading)
        yield _make_share_cell(row, "delta", gain, heading, text=f"{100 * gain.mean:+.2f}")
        yield _make_share_cell(row, "Uniform", signal.uniform, heading)
        yield MeasuredCell(row, "verdict", None, heading, text=signal.verdict)


def list_layers(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield the mean budget of every layer of every plan, and its pattern where a plan has several.

    Plans that have rows of their own are named by these.
    """
    for stage in stages:
        if not isinstance(stage.result, Plan):
            continue
        phase, *_ = stage.result.phases.values()
        size = stage.options["budget"]
        name = {row.format(size=size): label for row, label in table.rows.items()}.get(stage.name, "entries")
        for index, layer in enumerate(phase.layers):
            if layer is not None:
                budget = fmean(layer.budget)
                if len(stage.result.policies) > 1:
                    yield MeasuredCell(f"layer {index}", f"pattern at {size}", None, text=layer.policy.name)
                yield MeasuredCell(f"layer {index}", f"{name} at {size}", budget, text=f"{budget:.0f}")


def list_losses(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield LAVa's Table 14: the loss of the first and of the last layer's output."""
    for stage in _select_stages(stages, "evaluate"):
        names = {method.label: table.rows[method.name] for block in stage.result.blocks for method in block.methods}
        depths = [loss.layer for loss in stage.result.losses]
        for layer, key in dict(zip((min(depths), max(depths)), table.columns, strict=True)).items():
            layer_losses = [loss for loss in stage.result.losses if loss.layer == layer and loss.method in names]
            yield from (
                MeasuredCell(names[loss.method], loss.task, loss.loss, f"Layer {layer}", key) for loss in layer_losses
            )


def list_searches(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:  # noqa: ARG001
    """Yield EvolKV's Figure 2b: the best fitness so far after every generation of every search."""
    for stage in _select_stages(stages, "evolve"):
        best = accumulate((min(line.values) for _, line in stage.trace.generations), min)
        for number, value in enumerate(best, 1):
            yield MeasuredCell(f"generation {number}", f"fitness at {stage.options['budget']}", -value)


def list_needles(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield EvolKV's Figure 7: scores by depth and length of the full cache and of every row."""
    for stage, _, methods in _list_sizes(table, stages):
        labels = {method.label: table.rows[row] for row, method in methods.items()}
        for label, name in {FULL: FULL_CACHE_LABEL, **labels}.items():
            grid = stage.result.needle[label]
            for (depth, length), score in np.ndenumerate(np.array(grid.scores, np.float64)):
                place = f"{grid.depths[depth]}% deep", f"{grid.lengths[length]:,} tokens"
                if score == score:
                    yield MeasuredCell(*place, 100 * score, f"{name}, mean {100 * grid.mean:.1f}")


def list_costs(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield what caches cost (LAVa, Figure 3; LU-KV, Figure 5; EvolKV, Figure 8): `columns` say which of it."""
    for stage in _select_stages(stages, "bench"):
        steps = stage.options["new_tokens"]
        known = [cost for cost in stage.result.costs if Path(cost.cache).stem in table.rows]
        for heading, cost in product(table.columns, known):
            prompt = f"{cost.length:,} tokens"
            column, value = {
                "peak memory, MB": (prompt, cost.peak_bytes / 1e6),
                "time to first token, s": (prompt, cost.prefill_seconds),
                "decoding, ms per token": (prompt, 1e3 * cost.token_seconds),
                "inference, s": (f"{steps:,} new tokens", cost.prefill_seconds + steps * cost.token_seconds),
            }[heading]
            yield MeasuredCell(table.rows[Path(cost.cache).stem], column, value, heading)


# --- profiles ---------------------------------------------------------------------------------------------------------


def list_errors(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield PolyKV's Figure 1: the error of every layer's output under every pattern, then the scores."""
    for stage in _select_stages(stages, "calibrate"):
        signals = SignalTable(stage.result)
        for phase, budget in product(signals.axes.phases, signals.axes.budgets):
            for (row, pattern), value in np.ndenumerate(signals.measured("error", phase, budget)):
                layer = f"layer {stage.result.metadata.layers[row]}"
                yield MeasuredCell(layer, signals.patterns[pattern], 100 * value, f"{phase} at {budget}")
    yield from list_scores(table, stages)


def list_ratios(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:  # noqa: ARG001
    """Yield LU-KV's Figures 7 to 9: the local ratio of every head by the global one, in percent evicted."""
    for stage, evicted in product(_select_stages(stages, "calibrate"), range(5, 100, 5)):
        for (row, head), ratio in np.ndenumerate(stage.result.local_ratios(evicted / 100)):
            layer = f"layer {stage.result.metadata.layers[row]}"
            yield MeasuredCell(layer, f"{evicted}%", 100 * float(ratio), f"head {head}")


def list_profiles(table: PaperTable, stages: Sequence[Stage]) -> Iterator[MeasuredCell]:
    """Yield what LU-KV's figures show: recall by budget, eviction loss by layer, stability of local ratios."""
    ratio = table.paper["ratios"][0]
    known = {stage.name: stage.result for stage in stages}
    shared = known.pop("adakv", None)
    named = [(table.rows[stage], profile) for stage, profile in known.items()]
    for metric, profile in named:
        for row, name in ((metric, "recall"), (f"{metric}, oracle", "oracle_recall")):
            curve = 100 * profile.arrays[name].mean(axis=(0, 1))
            yield from (MeasuredCell(row, f"{kept}% kept", float(curve[kept]), "Figure 1") for kept in BUDGETS_SHOWN)
    for metric, profile in named:
        for name, loss in _compute_eviction_losses(profile, ratio, shared if metric == "SnapKV" else None).items():
            lost = {f"layer {layer}": sum(heads) for layer, heads in zip(profile.metadata.layers, loss, strict=True)}
            for column, value in {**lost, "all": loss.sum(), "worst head": loss.max()}.items():
                yield MeasuredCell(name, column, 100 * float(value), f"Figures 3, 4, 6: {metric}")
    for metric, profile in named:
        correlation = measure_stability(profile, ratio)
        for column in ("questions", "texts", "halves"):
            yield MeasuredCell(metric, column, getattr(correlation, column), "Figure 2b")
        for name, evicted, kept in compare_solvers(profile.arrays["mass"]):
            yield MeasuredCell(f"{metric}, {name}", f"{evicted}% evicted", 100 * kept, "Figure 2a")


def compare_solvers(curves: ArrayLike) -> Iterator[tuple[str, int, float]]:
    """Yield the share of importance that LU-KV's solver and an exact one keep, after their name and percent evicted.

    `curves` [L, Hkv, 101] is the importance that heads keep with 0 ... 100% of their entries.
    """
    steps = np.diff(np.asarray(curves, dtype=np.float64))
    greedy = MarginalSolver(steps)
    ratios = range(5, 100, 5)
    totals = [(100 - evicted) * steps[..., 0].size for evicted in ratios]
    for name, solved in (("greedy", greedy.solve_many(totals)), ("exact", solve_exactly(steps, totals))):
        for evicted, budgets in zip(ratios, solved, strict=True):
            yield name, evicted, greedy.kept(budgets) / float(steps.sum())


def _compute_eviction_losses(profile: Profile, ratio: float, shared: Profile | None) -> dict[str, Floats]:
    """Return what every head loses [L, Hkv] under the allocations of the paper."""
    shape = profile.metadata.shape
    length = profile.metadata.length
    total = round((1 - ratio) * length * shape[0] * shape[1])
    floor = max(profile.metadata.floor, 1)
    pyramid = Pyramid(window=floor).allocate(np.zeros(shape), total, np.full(shape, floor), np.full(shape, length))
    kept = {"Uniform": np.full(shape, 1 - ratio), "Pyramid": pyramid / length}
    if shared is not None:
        kept["Ada"] = 1 - shared.local_ratios(ratio)
    kept["LU-KV"] = 1 - profile.local_ratios(ratio)
    return {name: compute_lost_mass(profile, share) for name, share in kept.items()}


VIEWS: Mapping[str, Callable[[PaperTable, Sequence[Stage]], Iterator[MeasuredCell]]] = {
    "scores": list_scores,
    "best": compare_with_best,
    "categories": compare_by_category,
    "selections": list_selections,
    "signals": list_signals,
    "layers": list_layers,
    "losses": list_losses,
    "profiles": list_profiles,
    "ratios": list_ratios,
    "errors": list_errors,
    "searches": list_searches,
    "needles": list_needles,
    "costs": list_costs,
}
