"""kvsearch headroom: could any plan keep the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.headroom import MEANING, HeadroomOptions


@command(HeadroomOptions, dry_run=True)
def headroom(options: HeadroomOptions, console: Console) -> None:
    """Evict by true oracle importance, by simple policies and at random, and compare with the full cache.

    Example: kvsearch headroom bundled --length 1024
    """
    from kvsearch.jobs import headroom as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    from kvsearch.report.evaluation import plain_scores

    found = jobs.headroom(options, talk=console)
    if console.as_json:
        console.print_json(found.as_json())
        return
    title = f"{options.model}: score with {100 * options.ratio:g}% evicted, {options.samples} contexts a task"
    console.out.print(plain_scores(title, found.methods, found.rows))
    listed = "; ".join(f"{method} {share:.2f}" for method, share in found.shares.items())
    for line in MEANING:
        console.out.print(line, markup=False, soft_wrap=True)
    console.out.print(f"share of the full-cache score: {listed}", markup=False, soft_wrap=True)
