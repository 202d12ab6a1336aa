"""kvsearch recipes: the settings of papers and for models that are shipped with kvsearch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import typer

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.config.options import JobOptions, Option

recipes = typer.Typer(
    name="recipes", help="List, show or copy the recipes that are shipped: --recipe takes them by name.",
    no_args_is_help=True,
)  # fmt: skip


class ListOptions(JobOptions):
    """Which recipes to list."""

    job: ClassVar[str] = "recipes ls"

    verb: Annotated[str | None, Option("Those of this command only.", metavar="COMMAND", argument=True)] = None


class ShowOptions(JobOptions):
    """The recipe."""

    job: ClassVar[str] = "recipes show"

    name: Annotated[str, Option("A recipe, as `recipes ls` has it.", argument=True)]


class CopyOptions(ShowOptions):
    """The recipe, and where it goes."""

    job: ClassVar[str] = "recipes cp"

    output: Annotated[Path | None, Option("The file.", short="-o", shown="NAME.yaml here", recorded=False)] = None
    force: Annotated[bool, Option("Replace the file.", recorded=False)] = False


@command(ListOptions)
def ls(options: ListOptions, console: Console) -> None:
    """List the recipes by command, with what they say of themselves.

    Example: kvsearch recipes ls run
    """
    from kvsearch.config.recipes import FOLDERS, about, shipped_recipes
    from kvsearch.errors import UsageError
    from kvsearch.naming import suggest
    from kvsearch.report.screen import listing

    if options.verb is not None and options.verb not in FOLDERS:
        raise UsageError(f"no recipes are shipped for {options.verb!r}{suggest(options.verb, list(FOLDERS))}")
    found = {
        name: about(path) for name, path in shipped_recipes().items() if options.verb in (None, name.partition("/")[0])
    }
    if console.as_json:
        console.print_json({"recipes": [{"name": name, "about": text} for name, text in found.items()]})
        return
    table = listing("recipes: kvsearch COMMAND --recipe NAME", ["command/name", "what it is"])
    for name, text in found.items():
        table.add_row(name, text)
    console.out.print(table)


@command(ShowOptions)
def show(options: ShowOptions, console: Console) -> None:
    """Print a recipe.

    Example: kvsearch recipes show evolve/paper-8b
    """
    from kvsearch.config.recipes import shipped_recipe

    name, path = shipped_recipe(options.name)
    text = path.read_text(encoding="utf-8")
    if console.as_json:
        console.print_json({"name": name, "recipe": text})
    else:
        console.out.print(text.rstrip(), soft_wrap=True)


@command(CopyOptions)
def cp(options: CopyOptions, console: Console) -> None:
    """Copy a recipe to a file of your own, to edit it.

    Example: kvsearch recipes cp run/bundled -o mine.yaml
    """
    from kvsearch.config.recipes import shipped_recipe
    from kvsearch.plan.files import atomic_write, check_output

    name, path = shipped_recipe(options.name)
    job, _, stem = name.partition("/")
    output = Path(f"{stem}.yaml") if options.output is None else options.output
    check_output(output, options.force)
    atomic_write(output, path.read_bytes(), overwrite=options.force)
    if console.as_json:
        console.print_json({"name": name, "file": str(output)})
    else:
        console.say(f"wrote {output}: edit it, then give it to kvsearch {job} with --recipe {output}")


for action in (ls, show, cp):
    recipes.command(no_args_is_help=action is not ls)(action)
