"""kvsearch plan diff: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli.common import Common, command
from kvsearch.cli.render import show_view


@command
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another plan.", show_default=False)],
    common: Common,
) -> None:
    """Show what differs between two plans: settings, policies and their parameters, and budgets layer by layer.

    Where the plans come from is not compared. A setting that one of them does not state is shown as -.

    With --json, an object with equal (true or false), settings and budgets (lists of objects with before and after)
    and totals (by phase: those of A and B).

    Example: kvsearch plan diff plan.json smaller.json
    """
    from kvsearch.plan import load_plan
    from kvsearch.report.differences import DifferenceView

    show_view(DifferenceView.of((load_plan(before), load_plan(after)), (str(before), str(after))), common)
