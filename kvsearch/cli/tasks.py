"""kvsearch tasks: what a model can be asked, and what there is to know about one task."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.config.options import JobOptions, Option

if TYPE_CHECKING:
    from rich.table import Table

    from kvsearch.tasks.facts import TaskFacts


class TasksOptions(JobOptions):
    """Which tasks to show."""

    job: ClassVar[str] = "tasks"

    spec: Annotated[
        str | None, Option("Show these only, as for --tasks of evaluate; a single one in full.", argument=True)
    ] = None


@command(TasksOptions)
def tasks(options: TasksOptions, console: Console) -> None:
    """List the tasks that evaluate can ask, or show one in full.

    With --json, an object with tasks, a list of objects with these keys, and sets (names that stand for several tasks):

    spec: what --tasks takes
    category: the group that tables average it in
    metric
    source: where its texts come from
    needs: the file that you must bring, if any
    packages: Python packages that its metric needs
    options: those of evaluate that it reads
    split and splits: the default one, and all there are

    Example: kvsearch tasks ruler:vt
    """
    from kvsearch.tasks.entries import SETS
    from kvsearch.tasks.facts import describe_tasks

    found = describe_tasks(options.spec)
    if console.as_json:
        console.print_json({"tasks": [asdict(one) for one in found], "sets": SETS})
    elif len(found) == 1:
        _show(found[0], console)
    else:
        console.out.print(_listing(found))
        listed = "; ".join(f"{name} ({len(members)})" for name, members in SETS.items())
        console.say(f"sets: {listed}. One in full: kvsearch tasks SPEC")


def _listing(found: list[TaskFacts]) -> Table:
    from kvsearch.report.screen import listing

    table = listing("tasks", ["task", "category", "metric", "packages", "texts from"])
    for one, following in zip(found, [*found[1:], None], strict=True):
        cells = (one.spec, one.category, one.metric, ", ".join(one.packages) or "-", one.needs or one.source)
        last = following is not None and _kind(following) != _kind(one)
        table.add_row(*cells, end_section=last)
    return table


def _kind(facts: TaskFacts) -> str:
    return facts.spec.partition(":")[0]


def _show(facts: TaskFacts, console: Console) -> None:
    from kvsearch.cli.render import print_parts
    from kvsearch.report.screen import facts as lines_of

    lines = {
        "task": facts.spec, "category": facts.category, "metric": facts.metric, "texts from": facts.source,
        "needs": facts.needs or "no file of yours", "packages": ", ".join(facts.packages) or "none besides kvsearch",
        "options": " ".join(facts.options), "splits": f"{', '.join(facts.splits)}; default {facts.split}",
    }  # fmt: skip
    print_parts(lines_of(lines), console)
