"""Tables as papers print them: a row per method, a column per task or average, a block per size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvsearch.errors import UsageError
from kvsearch.evaluation.averages import SizeBlock
from kvsearch.evaluation.compare import Comparison
from kvsearch.evaluation.statistics import Kind, Row
from kvsearch.naming import suggest
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.methods import FULL

Columns = Literal["tasks", "categories", "averages"]
KINDS: dict[Columns, tuple[Kind, ...]] = {
    "tasks": ("task", "category", "average"), "categories": ("category", "average"), "averages": ("average",),
}  # fmt: skip
FEW = 12  # tasks that a screen has room for


class Cell(NamedTuple):
    """Text, and whether it is the best of its block."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under a common heading ("": none); the first cell of a row names it."""

    heading: str
    rows: list[list[Cell]]


@dataclass(frozen=True)
class TextTable:
    """A table before it is rendered."""

    title: str
    header: list[str]
    groups: list[Group]
    notes: tuple[str, ...] = ()


def find_columns(name: str) -> Columns:
    """What to have columns for; UsageError if there is no such choice."""
    for columns in KINDS:
        if name == columns:
            return columns
    raise UsageError(f"unknown columns {name!r}{suggest(name, list(KINDS))}")


def screen_columns(result: Comparison) -> Columns:
    """Tasks, unless they are too many for a screen."""
    return "tasks" if len(result.coverage) <= FEW else "categories"


def score_table(result: Comparison, columns: Columns) -> TextTable:
    """Mean scores in percent; the best of each block, the full cache aside, is marked where not all tie."""
    numbers = _column_numbers(result, columns)
    rows = [result.blocks[0].rows[number] for number in numbers]
    full = [Cell(FULL), *(Cell(_percent(row.scores[FULL].mean)) for row in rows)]
    groups = [Group("", [full]), *(Group(_heading(block), _scores(block, numbers)) for block in result.blocks)]
    title = f"{result.model}: score in percent ({_how(result)})"
    return TextTable(title, ["method", *_labels(result, rows)], groups, (*_explained(result), *result.notes))


def difference_table(result: Comparison, columns: Columns) -> TextTable:
    """Every method minus the subject, in percent, with 95% interval and questions won / tied / lost."""
    numbers = _column_numbers(result, columns)
    rows = [result.blocks[0].rows[number] for number in numbers]
    groups = []
    for block in result.blocks:
        named = {name: label for name, label in {FULL: FULL, **block.methods}.items() if label != block.subject}
        cells = [
            [Cell(name), *(Cell(_told(block.difference(block.rows[number], label))) for number in numbers)]
            for name, label in named.items()
        ]
        groups.append(Group(_heading(block), cells))
    title = (
        f"{result.model}: paired difference to {result.subject}, in points of 100, 95% interval; questions won / tied "
        f"/ lost ({_how(result)})"
    )
    return TextTable(title, ["method", *_labels(result, rows)], groups)


def mean_columns(result: Comparison) -> Columns:
    """Columns of differences, which are wide: the means."""
    return "categories" if any(row.kind == "category" for row in result.blocks[0].rows) else "averages"


def held_table(result: Comparison) -> TextTable:
    """What every method holds."""
    header = ["method", "entries", "share", "KiB", "share", "most entries while answering"]
    full = result.held[FULL]

    def row(name: str, label: str) -> list[Cell]:
        held = result.held[label]
        told = (
            name, f"{held.entries:.0f}", f"{held.entries / full.entries:.3f}", f"{held.bytes / 1024:.1f}",
            f"{held.bytes / full.bytes:.3f}", f"{held.most:.0f}",
        )  # fmt: skip
        return [Cell(text) for text in told]

    groups = [Group("", [row(FULL, FULL)])]
    groups += [Group(_heading(block), [row(*item) for item in block.methods.items()]) for block in result.blocks]
    what = "context" if result.protocol == "question-agnostic" else "prompt"
    return TextTable(f"{result.model}: held after the {what}, mean ({_how(result)})", header, groups)


def _how(result: Comparison) -> str:
    return f"{result.protocol}, phases: {result.phases}"


def _column_numbers(result: Comparison, columns: Columns) -> list[int]:
    """Which rows of a block become columns; of averages over the same tasks the first, of one task the task itself."""
    kinds, seen = KINDS[columns], set[frozenset[str]]()
    if len(result.coverage) == 1:
        return [0]
    chosen = []
    for number, row in enumerate(result.blocks[0].rows):
        if row.kind == "average":
            tasks = frozenset(result.averages[row.task])
            if tasks in seen:
                continue
            seen.add(tasks)
        if row.kind in kinds:
            chosen.append(number)
    return chosen


def _labels(result: Comparison, rows: Sequence[Row]) -> list[str]:
    """Headings of columns; averages over the same tasks share one."""
    found = []
    for row in rows:
        if row.kind == "average":
            tasks = set(result.averages[row.task])
            found.append(" = ".join(name for name, others in result.averages.items() if set(others) == tasks))
        else:
            found.append(row.task)
    return found


def _scores(block: SizeBlock, numbers: Sequence[int]) -> list[list[Cell]]:
    labels = block.methods.values()
    best = {n: _best([block.rows[n].scores[label].mean for label in labels]) for n in numbers}
    return [
        [Cell(name), *(_cell(block.rows[n], label, best[n]) for n in numbers)] for name, label in block.methods.items()
    ]


def _best(means: Sequence[float]) -> str | None:
    """The best score as it is printed; None where all are printed alike: none of them is better."""
    return _percent(max(means)) if len(set(map(_percent, means))) > 1 else None


def _cell(row: Row, label: str, best: str | None) -> Cell:
    text = _percent(row.scores[label].mean)
    return Cell(text, text == best)


def _heading(block: SizeBlock) -> str:
    return "" if block.size is None else block.size.words


def _explained(result: Comparison) -> tuple[str, ...]:
    plans = result.blocks[0].size is None
    uniform = plans and "uniform" in result.blocks[0].methods
    lines = [f"uniform: the policy of {result.subject} with even budgets"] * uniform
    lines += ["all methods but full hold as many entries as the plan"] * plans
    return tuple(lines)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _told(found: Difference) -> str:
    spread = f"{100 * found.mean:+.2f} [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"
    return f"{spread} {found.wins} / {found.ties} / {found.losses}"
