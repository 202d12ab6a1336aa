"""kvsearch select: choose the strategy of a calibration on fresh questions, or fall back to the best baseline."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import print_parts
from kvsearch.jobs.select import SelectOptions


@command(SelectOptions, dry_run=True)
def select(options: SelectOptions, console: Console) -> None:
    """Choose the best strategy of a PolyKV calibration, unless a single-policy baseline is as good: then choose that.

    All candidates and baselines answer the first half of split select, the best of them the other half. A strategy is
    written only if it leads the best baseline there by more than chance. What is written is reported on split report,
    beside the best candidates, and what it gains by its policies and what by its budgets.

    Example: kvsearch select runs/polykv --budget 64 -o plan.json
    """
    from kvsearch.jobs import select as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    from kvsearch.report.table import on_screen

    done = jobs.select(options, talk=console)
    if console.as_json:
        console.print_json(done.as_json())
    else:
        print_parts(map(on_screen, done.tables()), console)
    for one in done.found:
        console.say(f"wrote {one.plan} and {one.file}")
    for words in jobs.following_commands(options, done):
        console.next(*words)
