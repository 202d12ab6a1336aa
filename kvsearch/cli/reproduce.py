"""kvsearch reproduce: make a table of a paper again."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.reproduce import ReproduceOptions


@command(ReproduceOptions, dry_run=True)
def reproduce(options: ReproduceOptions, console: Console) -> None:
    """Make a table of a paper again, on any model: calibrate, search and ask as the paper did.

    The same command goes on where it stopped. For the bundled models there is a short form of every table, in their
    language. Beside the values are the paper's numbers where the model is the paper's.

    Examples: kvsearch reproduce --list

    kvsearch reproduce lava-table10 --list

    kvsearch reproduce lava-table10 bundled -o runs/reproduce
    """
    from kvsearch.jobs import reproduce as jobs

    if options.listed:
        from kvsearch.report.paper_list import as_json, parts

        if console.as_json:
            console.print_json(as_json(options.table))
            return
        for part in parts(options.table):
            console.out.print(part)
        return
    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    from kvsearch.report.table import on_screen

    done = jobs.reproduce(options, talk=console)
    if console.as_json:
        console.print_json(done.as_json())
    else:
        for table in done.tables():
            console.out.print(on_screen(table))
    for remark in done.remarks():
        console.say(remark)
