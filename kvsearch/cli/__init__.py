"""The command line: `kvsearch VERB`. One thin module per verb, imported when the verb runs and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvsearch.errors import UsageError
from kvsearch.printed import brief

# what the list of commands says of each: the first sentence of its own help
VERBS = {
    "run": "Find the best plan of a size: fit rankings, measure budgets, choose on fresh questions, report on others.",
    "calibrate": "Measure which cache entries a model can live without, and write a profile.",
    "validate": "Score the strategy of every signal against its inverse, a uniform strategy and random ones of the same"
    " size.",
    "select": "Choose the best strategy of a PolyKV calibration, unless a single-policy baseline is as good: then "
    "choose that.",
    "evolve": "Search the budgets that serve a task best, at an exact total; a start plan is kept unless one found "
    "beats it.",
    "export": "Write a plan that evicts a share of any prompt (--ratio) or keeps so many entries (--budget).",
    "evaluate": "Score methods or plans on the same questions as the full cache, all at the same size.",
    "reproduce": "Make a table of a paper again, on any model: calibrate, search and ask as the paper did.",
    "generate": "Read a context into the cache the plan allows, then answer a prompt from it (greedy).",
    "compress": "Read a context once, and write the cache that a plan leaves of it to a file, to be asked for ever.",
    "bench": "Measure time and memory of plans beside the full cache, on this machine.",
    "show": "Show a plan or a profile: tables and a heat map of layers and heads.",
    "verify": "Check that all that runs have written is whole: checksums, ledgers, schemas, sums, weights.",
    "report": "Write runs of any kind as one HTML page that needs no network: figures, tables, what was asked and how.",
    "headroom": "Evict by true oracle importance, by simple policies and at random, and compare with the full cache.",
    "lm-eval": "Run tasks of lm-evaluation-harness on the cache that a plan leaves (needs the extra `lm-eval`).",
    "policies": "List the eviction policies, those of other installed packages included, or show one in full.",
    "tasks": "List the tasks that evaluate can ask, or show one in full.",
    "recipes": "List, show or copy the recipes that are shipped: --recipe takes them by name.",
    "doctor": "Check versions, devices and the bundled models, and run one tiny generation on the runtime's cache.",
    "plan": "Make plans without calibration, change plans, compare them.",
}
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or that of the copy that typer brings
WITHOUT_ARGUMENTS = ("policies", "tasks", "doctor")  # these do something when nothing else is typed


@contextmanager
def _on_one_line() -> Iterator[None]:
    """Tell of options and verbs that do not exist as of everything else that is wrong; what was typed is data."""
    try:
        yield
    except _UsageError as error:
        if "NoArgs" in type(error).__name__:
            raise
        more = "" if error.ctx is None else f" (see `{error.ctx.command_path} -h`)"
        typer.echo(f"kvsearch: error: {brief(error.format_message())}{more}", err=True)
        raise typer.Exit(UsageError.exit_code) from error


class Verbs(TyperGroup):
    """Commands that are known by name and first sentence until one of them runs."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        """Read what stands before the verb."""
        with _on_one_line():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        """Read the rest, and run the verb."""
        with _on_one_line():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the command that is about to run in the place of its stand-in."""
        if args and args[0] in VERBS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(verb: str) -> Any:
    """Import the module of a verb and return its command."""
    name = verb.replace("-", "_")
    found = getattr(import_module(f"kvsearch.cli.{name}"), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(verb, no_args_is_help=verb not in WITHOUT_ARGUMENTS)(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="kvsearch",
    cls=Verbs,
    help="Find out offline which KV-cache entries a language model can live without, and run it on a smaller cache.",
    epilog="Exit codes: 0 done, 1 bug, 2 usage, 3 environment, 4 model or data incompatible, 128 + n "
    "stopped by signal n (130 by Ctrl-C).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for verb, sentence in VERBS.items():
    app.command(verb, help=sentence)(lambda: None)


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
    """Run the `kvsearch` command."""
    app()
