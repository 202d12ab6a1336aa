"""kvsearch bench: time and memory on this machine."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import show_view
from kvsearch.jobs.bench import BenchOptions


@command(BenchOptions, dry_run=True)
def bench(options: BenchOptions, console: Console) -> None:
    """Measure time and memory of plans beside the full cache, on this machine.

    The full cache is measured as transformers' DynamicCache, as its StaticCache (where all layers have full attention)
    and on kvsearch's own storage: what the last one gains is not a gain of evicting. All of them are in memory at once.
    """
    from kvsearch.jobs import bench as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    show_view(jobs.bench(options, talk=console), console)
