"""The command line: `kvsearch VERB`. One thin module per verb; nothing heavy is imported before a verb runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsearch.cli.calibrate import calibrate
from kvsearch.cli.doctor import doctor
from kvsearch.cli.evaluate import evaluate
from kvsearch.cli.evolve import evolve
from kvsearch.cli.export import export
from kvsearch.cli.generate import generate
from kvsearch.cli.headroom import headroom
from kvsearch.cli.lm_eval import lm_eval
from kvsearch.cli.plan import plan_app
from kvsearch.cli.policies import policies
from kvsearch.cli.select import select
from kvsearch.cli.show import show
from kvsearch.cli.tasks import tasks
from kvsearch.cli.validate import validate

app = typer.Typer(
    name="kvsearch",
    help="Find out offline which KV-cache entries a language model can live without, and run it on a smaller cache.",
    epilog="Exit codes: 0 done, 1 bug, 2 usage, 3 environment, 4 model or data incompatible, 130 interrupted.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
VERBS = (
    calibrate, validate, select, evolve, export, evaluate, generate, show, headroom, lm_eval, policies, tasks, doctor,
)  # fmt: skip
for verb in VERBS:
    app.command(no_args_is_help=verb not in (policies, tasks, doctor))(verb)
app.add_typer(plan_app, name="plan")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvsearch {version('kvsearch')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Find out offline which KV-cache entries a language model can live without, and run it on a smaller cache."""


def main() -> None:
    """Entry point of the `kvsearch` command."""
    app()
