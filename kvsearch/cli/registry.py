"""The registry of verbs: help, options and output, from which commands are made when they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import cleandoc
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from kvsearch.cli.command import DRY_RUN, GENERAL_FLAGS, describe_flags, make_command, read_catalog, run_typed

if TYPE_CHECKING:
    from kvsearch.cli.command import VerbCommand
    from kvsearch.cli.console import Console
    from kvsearch.commands.listings import Listing
    from kvsearch.core.errors import KvsearchError
    from kvsearch.report.figures import ReportPart
    from kvsearch.report.screen import View

Action = Callable[[Any, "Console"], None]
Printer = Callable[["Console"], None]


@dataclass(frozen=True)
class Output:
    """The output of a command.

    Args:
        as_json: returns the result for --json.
        show: prints it for people, in place of the JSON, where remarks do not say all.
        remarks: said after either, the commands that naturally follow last.
        problem: raised when all is said, as the exit code tells of it, too.
    """

    as_json: Callable[[], Any]
    show: Printer | None = None
    remarks: Iterable[str] = ()
    problem: KvsearchError | None = None

    def print(self, console: Console) -> None:
        """Print the result, as JSON if requested, and the remarks."""
        if console.as_json:
            console.print_json(self.as_json())
        elif self.show is not None:
            self.show(console)
        for remark in self.remarks:
            console.say(remark)
        if self.problem is not None:
            raise self.problem


def view_output(view: View) -> Output:
    """Make the output of a result with its own JSON and parts."""
    return Output(view.as_json, make_parts_printer(view.parts))


def listing_output(listing: Listing) -> Output:
    """Make the output of a listing: content as JSON, and parts."""
    content, parts = listing
    return Output(lambda: content, make_parts_printer(lambda: parts))


def print_forecast(dry_run: Callable[..., View], options: Any, console: Console) -> None:
    """Print what a job would cost, as its function `dry_run` forecasts it."""
    from kvsearch.commands.public import run_job

    view_output(run_job(dry_run, options, console, dry=True)).print(console)


def make_parts_printer(parts: Callable[[], Iterable[ReportPart]]) -> Printer:
    """Make a function that prints lines and tables."""
    return lambda console: console.out.print_parts(parts())


def make_kind_printer(kind: str, result: Any) -> Printer:
    """Make a function that prints a result of this kind as `kvsearch show` prints its file."""

    def show(console: Console) -> None:
        from kvsearch.report.artifacts import ARTIFACT_KINDS

        console.out.print_parts(ARTIFACT_KINDS[kind].parts(result))

    return show


@dataclass(frozen=True)
class Verb:
    """A command: its name, help, options and action.

    Args:
        options: module and class, as in "kvsearch.commands.run:RunOptions"; imported when the verb runs.
        action: takes checked options and a console.
        dry_run: whether it has that flag.
        needs_arguments: whether the help is shown when nothing else is typed.
    """

    name: str
    help: str
    options: str
    action: Action
    dry_run: bool = False
    needs_arguments: bool = True

    def load_command(self, is_told: bool = False) -> VerbCommand:
        """Load the command from its options, or only for help and completion, without importing them."""
        flags = read_catalog(self.options) if is_told else describe_flags(resolve_name(self.options))
        if self.dry_run:
            flags.append(DRY_RUN)

        def run(typed: dict[str, Any]) -> None:
            run_typed(resolve_name(self.options), self.action, typed)

        return make_command(self.name, self.help, [*flags, *GENERAL_FLAGS], run)


MAIN_VERBS: dict[str, Verb] = {}
PLAN_VERBS: dict[str, Verb] = {}


def verb(options: str, *, group: dict[str, Any] = MAIN_VERBS, **how: Any) -> Callable[[Action], Action]:
    """Register a function of checked options and a console; its docstring is the help. See `Verb` for the rest."""

    def register(action: Action) -> Action:
        name = action.__name__.replace("_", "-")
        group[name] = Verb(name, cleandoc(action.__doc__ or ""), options, action, **how)
        return action

    return register
