"""kvsearch headroom: could any plan keep the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import show_view
from kvsearch.jobs.headroom import HeadroomOptions


@command(HeadroomOptions, dry_run=True)
def headroom(options: HeadroomOptions, console: Console) -> None:
    """Evict by true oracle importance, by simple policies and at random, and compare with the full cache.

    Example: kvsearch headroom bundled --length 1024
    """
    from kvsearch.jobs import headroom as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    show_view(jobs.headroom(options, talk=console), console)
