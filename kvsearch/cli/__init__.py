"""The command line: `kvsearch VERB`. Imports of a verb happen when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

import kvsearch
from kvsearch.cli import plan, verbs  # noqa: F401 - they register
from kvsearch.cli.command import MAIN_VERBS, PLAN_VERBS, make_group
from kvsearch.cli.streams import guarded_streams

ABOUT = "Find out offline which KV-cache entries a language model can live without, and run it on a smaller cache."
app = make_group(
    "kvsearch",
    ABOUT,
    MAIN_VERBS,
    epilog="Exit codes: 0 done, 1 bug, 2 usage, 3 environment, 4 model or data incompatible, 128 + n "
    "stopped by signal n (130 by Ctrl-C).",
)
app.add_typer(make_group("plan", "Make plans without calibration, change plans, compare them.", PLAN_VERBS))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvsearch {kvsearch.__version__}")
        raise typer.Exit


@app.callback(help=ABOUT)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Read what stands before the verb."""


def main() -> None:
    """Run the `kvsearch` command."""
    with guarded_streams():
        app()
