"""A comparison of methods as papers print it: a row per method, a column per task or average, a block per size.

Beside the tables: CSV with every number, JSON for programs, and the plain table of `kvsearch headroom`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from typing import Protocol as Shape

from kvsearch.errors import UsageError
from kvsearch.evaluation.averages import SizeBlock
from kvsearch.evaluation.footprint import Footprint
from kvsearch.evaluation.layer_loss import LayerLoss
from kvsearch.evaluation.statistics import Kind, Row
from kvsearch.naming import unknown
from kvsearch.plan.files import atomic_write
from kvsearch.plan.protocol import Protocol
from kvsearch.printed import csv_text
from kvsearch.report import table
from kvsearch.report.asked import asked_words
from kvsearch.report.files.evaluation import SECTIONS
from kvsearch.report.losses import losses_json, losses_table
from kvsearch.report.needle import grid_table, grids_json, needle_grids
from kvsearch.report.numbers import bounds, interval, outcomes, percent
from kvsearch.report.screen import screen_table
from kvsearch.report.table import Cell, RowGroup, Table
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.strategies.names import FULL
from kvsearch.tasks.coverage import Coverage
from kvsearch.tasks.niah import Grid

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as ScreenTable

    from kvsearch.evaluation.compare import Comparison

Columns = Literal["tasks", "categories", "averages"]
KINDS: dict[Columns, tuple[Kind, ...]] = {
    "tasks": ("task", "category", "average"), "categories": ("category", "average"), "averages": ("average",),
}  # fmt: skip
FEW = 12  # tasks that a screen has room for
SCHEMA = "kvsearch.evaluation/1"
CSV_HEADER = (
    "size", "method", "column", "kind", "questions", "score", "score_low", "score_high", "subject", "difference",
    "difference_low", "difference_high", "wins", "ties", "losses", "entries", "protocol", "phases",
)  # fmt: skip


def as_json(result: Comparison, losses: Sequence[LayerLoss] | None = None) -> dict[str, Any]:
    """Return the whole evaluation but for the single replies and what depends on the machine's speed.

    Scores are in [0, 1], differences are a method minus the subject. docs/evaluation.md describes every field.
    """

    def sections(records: Iterable[tuple[Row, Estimate | Difference]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
        for row, record in records:
            found[SECTIONS[row.kind]][row.task] = asdict(record)
        return found

    def scores(block: SizeBlock, label: str) -> dict[str, Any]:
        return sections((row, row.scores[label]) for row in block.rows)

    def differences(block: SizeBlock, label: str) -> dict[str, Any] | None:
        return None if label == block.subject else sections((row, block.difference(row, label)) for row in block.rows)

    def tasks_won(block: SizeBlock, label: str) -> dict[str, int] | None:
        found = None if label == block.subject else block.tasks_won(label)
        return found and found._asdict()

    def block_json(block: SizeBlock) -> dict[str, Any]:
        by_label = {method.label: method for method in result.methods}
        return {
            "size": None if block.size is None else block.size.as_json(),
            "methods": [
                {
                    "name": name, "label": label, "definition": by_label[label].definition,
                    "phases": by_label[label].phases, "held": result.held[label]._asdict(),
                    "scores": scores(block, label), "differences": differences(block, label),
                    "contexts": result.seen[name].as_json() if name in result.seen else None,
                    "tasks_won": tasks_won(block, label),
                }
                for name, label in block.methods.items()
            ],
            "full_differences": differences(block, FULL),
        }  # fmt: skip

    whole: dict[str, Any] = {
        "schema": SCHEMA, "model": result.model, **result.settings.as_json(), "subject": result.subject,
        "phases": result.phases, "environment": dict(result.environment), "most_tokens": result.most_tokens,
        "tasks": [{**asdict(covered), "metric": result.metrics[covered.task]} for covered in result.coverage],
        "averages": {name: list(tasks) for name, tasks in result.averages.items()},
        "full": {"held": result.held[FULL]._asdict(), "scores": scores(result.blocks[0], FULL)},
        "blocks": [block_json(block) for block in result.blocks],
        "notes": result.notes, "different_settings": result.different,
    }  # fmt: skip
    grids = needle_grids(result.samples)
    if grids:
        whole["needle"] = grids_json(grids)
    if losses is not None:
        whole["losses"] = losses_json(losses)
    return whole


class Compared(Shape):
    """What tables are made of: a comparison, or what its report kept of one."""

    @property
    def model(self) -> str: ...

    @property
    def subject(self) -> str: ...

    @property
    def protocol(self) -> Protocol: ...

    @property
    def phases(self) -> str: ...

    @property
    def coverage(self) -> Sequence[Coverage]: ...

    @property
    def averages(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def blocks(self) -> Sequence[SizeBlock]: ...

    @property
    def held(self) -> Mapping[str, Footprint]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def different(self) -> str | None: ...


def find_columns(name: str) -> Columns:
    """Return what to have columns for; UsageError if there is no such choice."""
    for columns in KINDS:
        if name == columns:
            return columns
    raise UsageError(unknown("columns", name, list(KINDS)))


def tables(result: Compared, columns: Columns | None = None, *, intervals: bool = False) -> list[Table]:
    """Return scores, differences and what is held; by default columns are tasks, unless they are too many.

    With `intervals`, scores have theirs, too, as differences always have.
    """
    chosen = columns or ("tasks" if len(result.coverage) <= FEW else "categories")
    has_categories = any(row.kind == "category" for row in result.blocks[0].rows)
    means: Columns = "categories" if has_categories else "averages"  # columns of differences are wide
    return [score_table(result, chosen, intervals=intervals), difference_table(result, means), held_table(result)]


def write_tables(result: Compared, path: Path, columns: Columns = "tasks", overwrite: bool = True) -> None:
    """Write the tables as Markdown or LaTeX, or every number in rows as CSV, by the suffix; see `check_table_file`."""
    table.check_table_file(path)
    if path.suffix == table.CSV:
        atomic_write(path, csv_rows(result).encode(), overwrite)
    else:
        table.write_tables(tables(result, columns), path, overwrite)


def parts(
    result: Compared,
    grids: Mapping[str, Grid],
    losses: Sequence[LayerLoss] | None = None,
    columns: Columns | None = None,
) -> Iterator[RenderableType]:
    """Yield all tables for the screen, grids of needles and output losses where there are any."""
    yield from map(table.on_screen, tables(result, columns, intervals=True))
    for method, grid in grids.items():
        yield grid_table(f"{method} ({_how(result)})", grid)
    if losses is not None:
        yield losses_table(f"{result.model}, phases: {result.phases}", result.protocol, losses)


def score_table(result: Compared, columns: Columns, *, intervals: bool = False) -> Table:
    """Return mean scores in percent, with 95% intervals or without.

    The best of each block, the full cache aside, is marked where not all tie.
    """
    numbers = _column_numbers(result, columns)

    def shown(row: Row, label: str) -> str:
        return _score(row, label) + (f" {bounds(row.scores[label], '.1f')}" if intervals else "")

    groups = [RowGroup("", [[Cell(FULL), *(Cell(shown(result.blocks[0].rows[n], FULL)) for n in numbers)]])]
    for block in result.blocks:
        rows = [[Cell(name)] for name in block.methods]
        for number in numbers:
            texts = [_score(block.rows[number], label) for label in block.methods.values()]
            best = max(texts, key=float) if len(set(texts)) > 1 else None  # printed alike, none of them is better
            for row, text, label in zip(rows, texts, block.methods.values(), strict=True):
                row.append(Cell(shown(block.rows[number], label), text == best))
        groups.append(RowGroup(_heading(block), rows))
    plans = result.blocks[0].size is None
    uniform = plans and "uniform" in result.blocks[0].methods
    notes = [
        *[f"uniform: the policy of {result.subject} with even budgets"] * uniform,
        *["all methods but full hold as many entries as the plan"] * plans,
        *result.notes,
    ]
    title = f"{result.model}: score in percent{', 95% interval' if intervals else ''} ({_how(result)})"
    above = () if result.different is None else (result.different,)
    return Table(title, _header(result, numbers), groups, tuple(notes), above)


def difference_table(result: Compared, columns: Columns) -> Table:
    """Return every method minus the subject, in percent, with 95% interval and questions won / tied / lost."""
    numbers, groups = _column_numbers(result, columns), []
    for block in result.blocks:
        rows = []
        for name, label in {FULL: FULL, **block.methods}.items():
            if label != block.subject:
                found = [block.difference(block.rows[number], label) for number in numbers]
                won = block.tasks_won(label)
                told = [f"{interval(one, '+.2f')} {outcomes(one)}" for one in found]
                rows.append([Cell(text) for text in (name, *told, *([outcomes(won)] if won else []))])
        groups.append(RowGroup(_heading(block), rows))
    title = (
        f"{result.model}: paired difference to {result.subject}, in points of 100, 95% interval; questions (and tasks) "
        f"won / tied / lost ({_how(result)})"
    )
    header = [*_header(result, numbers), *["tasks"] * (len(result.coverage) > 1)]
    return Table(title, header, groups)


def held_table(result: Compared) -> Table:
    """Return what every method holds."""
    full = result.held[FULL]

    def row(name: str, label: str) -> list[Cell]:
        held = result.held[label]
        cells = (
            name, f"{held.entries:.0f}", f"{held.entries / full.entries:.3f}", f"{held.bytes / 1024:.1f}",
            f"{held.bytes / full.bytes:.3f}", f"{held.most:.0f}",
        )  # fmt: skip
        return [Cell(text) for text in cells]

    groups = [RowGroup("", [row(FULL, FULL)])]
    groups += [RowGroup(_heading(block), [row(*item) for item in block.methods.items()]) for block in result.blocks]
    what = "context" if result.protocol == "question-agnostic" else "prompt"
    header = ["method", "entries", "share", "KiB", "share", "most entries while answering"]
    return Table(f"{result.model}: held after the {what}, mean ({_how(result)})", header, groups)


def csv_rows(result: Compared) -> str:
    """Return a row per size, method and column; scores in [0, 1], differences to the subject at the same size."""
    rows: list[Sequence[object]] = [CSV_HEADER]
    for block in result.blocks:
        size = "" if block.size is None else str(block.size)
        for name, label in {FULL: FULL, **block.methods}.items():
            for row in block.rows:
                score = asdict(row.scores[label]).values()
                known = label != block.subject
                compared = asdict(block.difference(row, label)).values() if known else [""] * 6
                asked = (result.held[label].entries, result.protocol, result.phases)
                named = (size, name, row.task, row.kind, row.questions)
                rows.append([*named, *score, result.subject, *compared, *asked])
    return csv_text(rows)


def plain_scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> ScreenTable:
    """Return mean scores only."""
    made = screen_table(title, ["task", "questions", *methods], left=["task"])
    for row in rows:
        label = f"{row.task} (mean)" if row.kind == "category" else row.task
        made.add_row(label, str(row.questions), *(f"{row.scores[m].mean:.2f}" for m in methods))
    return made


def _score(row: Row, label: str) -> str:
    return percent(row.scores[label].mean)


def _heading(block: SizeBlock) -> str:
    return "" if block.size is None else block.size.words


def _how(result: Compared) -> str:
    return f"{result.protocol}, phases: {result.phases}, {asked_words(result.coverage)}"


def _column_numbers(result: Compared, columns: Columns) -> list[int]:
    """Return which rows of a block become columns.

    Of averages over the same tasks that is the first, of one task the task itself and its categories.
    """
    rows = result.blocks[0].rows
    if len(result.coverage) == 1:
        return [n for n, row in enumerate(rows) if n == 0 or row.kind == "category" in KINDS[columns]]
    seen, chosen = set[frozenset[str]](), []
    for number, row in enumerate(rows):
        if row.kind == "average":
            tasks = frozenset(result.averages[row.task])
            if tasks in seen:
                continue
            seen.add(tasks)
        if row.kind in KINDS[columns]:
            chosen.append(number)
    return chosen


def _header(result: Compared, numbers: Sequence[int]) -> list[str]:
    """Return the headings of columns; averages over the same tasks share one."""
    found = ["method"]
    for row in (result.blocks[0].rows[number] for number in numbers):
        if row.kind == "average":
            tasks = set(result.averages[row.task])
            found.append(" = ".join(name for name, others in result.averages.items() if set(others) == tasks))
        else:
            found.append(row.task)
    return found
