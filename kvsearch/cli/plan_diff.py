"""kvsearch plan diff: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import show_view
from kvsearch.config.options import JobOptions, Option


class DiffOptions(JobOptions):
    """The plans to compare."""

    job: ClassVar[str] = "plan diff"

    before: Annotated[Path, Option("A plan.", metavar="A", argument=True)]
    after: Annotated[Path, Option("Another plan.", metavar="B", argument=True)]


@command(DiffOptions)
def diff(options: DiffOptions, console: Console) -> None:
    """Show what differs between two plans: settings, policies and their parameters, and budgets layer by layer.

    Where the plans come from is not compared. A setting that one of them does not state is shown as -.

    With --json, an object with equal (true or false), settings and budgets (lists of objects with before and after)
    and totals (by phase: those of A and B).

    Example: kvsearch plan diff plan.json smaller.json
    """
    from kvsearch.plan import load_plan
    from kvsearch.report.differences import DifferenceView

    plans = load_plan(options.before), load_plan(options.after)
    show_view(DifferenceView.of(plans, (str(options.before), str(options.after))), console)
