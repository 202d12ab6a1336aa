"""The command line: `kvsearch VERB`. What a verb needs is imported when it runs and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvsearch.cli.registry import first_sentence
from kvsearch.cli.verbs import VERBS
from kvsearch.core.errors import UsageError
from kvsearch.core.printed import brief

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or that of the copy that typer brings


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
            self.commands[args[0]] = VERBS[args[0]].load_command()
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="kvsearch",
    cls=Verbs,
    help="Find out offline which KV-cache entries a language model can live without, and run it on a smaller cache.",
    epilog="Exit codes: 0 done, 1 bug, 2 usage, 3 environment, 4 model or data incompatible, 128 + n "
    "stopped by signal n (130 by Ctrl-C).",
    no_args_is_help=True,
    rich_markup_mode=None,  # which takes as long to import as all else; that of a verb has its panels
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for verb in VERBS.values():
    app.command(verb.name, short_help=first_sentence(verb))(lambda: None)


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
