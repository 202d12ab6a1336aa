"""kvsearch show: what is in a plan or a profile."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import show_view
from kvsearch.jobs.show import ShowOptions


@command(ShowOptions)
def show(options: ShowOptions, console: Console) -> None:
    """Show a plan or a profile: tables and a heat map of layers and heads.

    For a profile: local eviction ratios and whether they are stable across questions and texts; of LU-KV, how far the
    policy's ranking is from the oracle's, and the eviction loss of uniform budgets and of LU-KV's; of a dynamic method,
    how many entries a static table moves. Of PolyKV: what every pattern does to every layer, without --ratio.
    """
    from kvsearch.jobs import show as jobs

    show_view(jobs.show(options, talk=console), console)
