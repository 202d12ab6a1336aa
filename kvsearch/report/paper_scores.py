"""Cells of a paper's table that are scores of evaluations: of all methods, or beside the best single policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsearch.choose.verdicts import Validation
from kvsearch.evaluation.averages import SizeBlock
from kvsearch.evaluation.compare import Comparison
from kvsearch.evaluation.layer_loss import LayerLoss
from kvsearch.evaluation.statistics import Row as ScoreRow
from kvsearch.papers.table import PaperTable, Row, Stage
from kvsearch.plan import Plan, Profile
from kvsearch.report.reproduced import LEFT_OUT, Measured
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.strategies.names import FULL

FULL_CACHE, AVERAGE = "Full", "average"


@dataclass(frozen=True)
class Finished:
    """A finished stage, with what its kind of job finds.

    `left_out` says which methods a model cannot run, and why; `remarks` are what the job says of its options, such as
    patterns that cannot be tried.
    """

    stage: Stage
    comparison: Comparison | None = None
    losses: Sequence[LayerLoss] = ()
    plan: Plan | None = None
    profile: Profile | None = None
    selection: Mapping[str, Any] | None = None
    validation: Validation | None = None
    left_out: Mapping[str, str] | None = None
    remarks: Sequence[str] = ()


def scores(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield the scores of all rows at all sizes, after those of the full cache."""
    for one, result in evaluations(found):
        first = True
        for block in result.blocks:
            columns = _columns(table, block)
            heading = _heading(one.stage, block)
            if first:
                for column, scored in columns:
                    yield share_cell(FULL_CACHE, column, scored.scores[FULL], one.stage.block)
                first = False
            for row in table.rows:
                method = _method(row, one.stage, block)
                if method in (one.left_out or {}):
                    yield Measured(row.label, columns[-1][0], None, heading, text=LEFT_OUT)
                elif (label := block.methods.get(method)) is not None:
                    key = _key(one.stage, block)
                    for column, scored in columns:
                        yield share_cell(row.label, column, scored.scores[label], heading, key, ranked=True)


def evaluations(found: Sequence[Finished]) -> Iterator[tuple[Finished, Comparison]]:
    """Yield the stages that are evaluations, with what they compared."""
    yield from ((one, one.comparison) for one in found if one.comparison is not None)


def _columns(table: PaperTable, block: SizeBlock) -> list[tuple[str, ScoreRow]]:
    """Return the rows of scores that become columns: tasks or categories, then the paper's average."""
    kind = {"tasks": "task", "categories": "category"}.get(table.columns)
    inner = [(row.task, row) for row in block.rows if row.kind == kind]
    named = {row.task: row for row in block.rows if row.kind == "average"}
    return [*inner, (AVERAGE, named.get(table.average, block.overall))]


def _method(row: Row, stage: Stage, block: SizeBlock) -> str:
    return row.method.format(size=block.size, block=stage.block)


def _heading(stage: Stage, block: SizeBlock) -> str:
    words = "" if block.size is None else block.size.words
    return ", ".join(filter(None, (stage.block, words)))


def _key(stage: Stage, block: SizeBlock) -> str:
    return f"{stage.block} {block.size}".strip()


def share_cell(
    row: str, column: str, found: Estimate | Difference, block: str = "", key: str = "", *, ranked: bool = False
) -> Measured:
    """Return a cell of a share, in points of 100."""
    return Measured(
        row, column, 100 * found.mean, block, key or block, 100 * found.low, 100 * found.high, ranked=ranked
    )


# --- the strongest baseline ------------------------------------------------------------------------------------------


def beside_best(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield PolyKV's Table 2: the best single policy, strategies, and the better one's lead."""
    for one, result in evaluations(found):
        for block in result.blocks:
            overall, (name, label) = _overall(table, block), _best_baseline(table, block)
            row, key = "" if block.size is None else str(block.size), "" if block.size is None else str(block.size)
            yield Measured(row, FULL_CACHE, 100 * overall.scores[FULL].mean, key=key)
            best = 100 * overall.scores[label].mean
            yield Measured(row, "Baseline", best, key=key, text=f"{best:.2f} ({name})")
            strategies = []
            for told in table.rows:
                if "{size}" in told.method and (mine := block.methods.get(_method(told, one.stage, block))):
                    strategies.append(100 * overall.scores[mine].mean)
                    yield Measured(row, told.label, strategies[-1], key=key)
            if strategies:
                lead = max(strategies) - best
                yield Measured(row, "delta", lead, key=key, text=f"{lead:+.2f}")


def by_category(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield PolyKV's Table 4: the strategy minus the best single policy, by category."""
    for one, result in evaluations(found):
        for block in result.blocks:
            name, label = _best_baseline(table, block)
            strategy = next(
                mine for row in table.rows if "{" in row.method
                if (mine := block.methods.get(_method(row, one.stage, block)))
            )  # fmt: skip
            rows = [(row.task, row) for row in block.rows if row.kind == "category"]
            for category, row in [*(rows or _tasks(block)), (AVERAGE, _overall(table, block))]:
                lead = 100 * (row.scores[strategy].mean - row.scores[label].mean)
                heading = f"{one.stage.block}: minus {name}"
                yield Measured(category, "delta", lead, heading, one.stage.block, text=f"{lead:+.2f}")


def _tasks(block: SizeBlock) -> list[tuple[str, ScoreRow]]:
    return [(row.task, row) for row in block.rows if row.kind == "task"]


def _overall(table: PaperTable, block: SizeBlock) -> ScoreRow:
    return _columns(table, block)[-1][1]


def _best_baseline(table: PaperTable, block: SizeBlock) -> tuple[str, str]:
    """Return the name and the label of the row without a plan of its own that scores highest."""
    overall = _overall(table, block)
    named = {
        row.label: block.methods[row.method]
        for row in table.rows
        if "{" not in row.method and row.method in block.methods
    }
    return max(named.items(), key=lambda item: overall.scores[item[1]].mean)
