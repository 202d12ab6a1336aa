"""kvsearch evolve: search the budgets on a task, choose on fresh questions, report on others."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.evolve import EvolveOptions


@command(EvolveOptions, dry_run=True)
def evolve(options: EvolveOptions, console: Console) -> None:
    """Search the budgets that serve a task best, at an exact total; a start plan is kept unless one found beats it.

    Searched on split train, chosen on split select, reported on split report, on contexts that no --start was fitted
    or chosen on. Writes plan.json, report.json and a
    ledger to the directory; an interrupted search goes on with --resume.

    Example: kvsearch evolve bundled --budget 64 --set window=8 --group-size 2 -o runs/evolve
    """
    from kvsearch.jobs import evolve as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    from kvsearch.report.table import on_screen

    found = jobs.evolve(options, talk=console)
    if console.as_json:
        console.print_json(found.as_json())
    else:
        for table in found.tables():
            console.out.print(on_screen(table))
    for remark in found.remarks():
        console.say(remark)
