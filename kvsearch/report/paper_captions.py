"""What stands around a paper's table: what was asked, what is not as in the paper, and whose numbers are beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvsearch.papers.catalog import model_of
from kvsearch.papers.numbers import Key, numbers
from kvsearch.papers.table import PaperTable
from kvsearch.report.numbers import counted
from kvsearch.report.paper_scores import AVERAGE, Finished
from kvsearch.report.paper_views import cells
from kvsearch.report.reproduced import Measured, Reproduced

OTHER_TASKS = "other tasks than the paper's are asked: beside them are its numbers of single tasks alone"


def reproduced(
    table: PaperTable,
    model: str,
    short: bool,
    found: Sequence[Finished],
    content: Mapping[str, Any],
    own_tasks: bool = False,
) -> Reproduced:
    """Return a table of what its stages found; `content` is what it is made of.

    `short` says that it is the short form, `own_tasks` that what is asked was chosen by the user: means over these are
    not beside the paper's.
    """
    named = model_of(table, model)
    known = {key: value for key, value in numbers(table.name).items() if not own_tasks or _is_of_task(table, key)}
    made = tuple(cell.beside(named, known) for cell in cells(table, found))
    title = f"{table.source}, {table.where}, on {model}: {table.shows}"
    return Reproduced(
        table.name, title, made, tuple(_asked(found)),
        tuple(_notes(table, model, short, made, found)) + ((OTHER_TASKS,) if own_tasks and named else ()), content,
    )  # fmt: skip


def _is_of_task(table: PaperTable, key: Key) -> bool:
    """Tell whether a number of the paper is that of one task."""
    return table.view == "scores" and table.columns == "tasks" and key[-1] != AVERAGE


def _asked(found: Sequence[Finished]) -> Iterator[str]:
    """Say of every search, evaluation and selection what was asked, how, and of which split; what is alike once."""
    yield from dict.fromkeys(", ".join(_words(one)) for one in found if "tasks" in one.stage.options)


def _words(one: Finished) -> Iterator[str]:
    asked, what = one.stage.options, "searched" if one.stage.job == "evolve" else one.stage.block or "asked"
    length = f" of {', '.join(f'{tokens:,}' for tokens in asked['length'])} tokens" if "length" in asked else ""
    yield f"{what}: {asked['tasks']}, {counted(asked['samples'], 'context')} of a task{length}"
    yield _split(one)
    yield asked["protocol"]
    if one.comparison is not None:
        covered = one.comparison.coverage
        contexts, questions = sum(task.contexts for task in covered), sum(task.questions for task in covered)
        yield f"evicting in {one.comparison.phases}"
        yield f"{counted(contexts, 'context')} with {counted(questions, 'question')}"


def _split(one: Finished) -> str:
    """Return which part of the examples was asked."""
    from kvsearch.tasks.facts import describe_tasks

    known = {"evolve": "train", "select": "select, then report", "validate": "select"}
    stated = known.get(one.stage.job) or one.stage.options.get("split")
    default = " and ".join(sorted({task.split for task in describe_tasks(one.stage.options["tasks"])}))
    return f"split {stated or default}"


def _notes(
    table: PaperTable, model: str, short: bool, made: Sequence[Measured], found: Sequence[Finished]
) -> Iterator[str]:
    """Say what is not as in the paper, what is left out, and whether the paper's numbers are beside."""
    for one in found:
        yield from one.remarks
        for name, why in (one.left_out or {}).items():
            label = next((row.label for row in table.rows if row.method == name), name)
            yield f"{label} is left out: {why}"
        if one.selection is not None and one.selection["written"]["fallback"]:
            name = one.selection["written"]["name"]
            yield f"{one.stage.block}: no strategy beats the best single policy beyond doubt, the plan is {name}"
        if one.comparison is not None:
            yield from one.comparison.notes
            if one.comparison.different is not None:
                yield one.comparison.different
    yield from (f"not as in the paper: {one}" for one in table.changed)
    if short:
        yield from (f"made smaller: {one}" for one in table.smaller)
    if any(cell.paper is not None for cell in made):
        yield f"rows with 'paper' are the paper's numbers for {model_of(table, model)}, on its own samples"
    elif model_of(table, model) is None:
        yield f"without the paper's numbers: {model} is none of its models ({', '.join(table.models)})"
    else:
        yield "without the paper's numbers: they are in a figure, or cannot be read from its text beyond doubt"
