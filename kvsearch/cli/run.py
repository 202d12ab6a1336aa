"""kvsearch run: from a model to its best plan in one command."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.run import RunOptions


@command(RunOptions, dry_run=True)
def run(options: RunOptions, console: Console) -> None:
    """Find the best plan of a size: fit rankings, measure budgets, choose on fresh questions, report on others.

    A plan is written if it beats every single policy with its own budgets beyond doubt, else the best of these. The
    same command goes on where it stopped; --dry-run says what every stage costs.

    Example: kvsearch run bundled --budget 51 -o runs/best
    """
    from kvsearch.jobs import run as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    from kvsearch.report.table import on_screen

    done = jobs.run(options, talk=console)
    if console.as_json:
        console.print_json(done.as_json())
    elif console.verbose:
        for table in done.tables():
            console.out.print(on_screen(table))
    for remark in done.remarks():
        console.say(remark)
