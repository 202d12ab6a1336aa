"""Commands from the options of jobs: verbs are registered, flags and help are made from the fields of a model.

Fields are described by a `Flag` each. The flags of all verbs are in the file `CATALOG`, which is made of the fields too
(`python -m tests.cli.test_help` writes it): help and completion read it, and import no options.
"""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from kvsearch.core.errors import UsageError
from kvsearch.core.printed import truncate_lines

if TYPE_CHECKING:
    from kvsearch.cli.console import Console
    from kvsearch.config.options import JobOptions
    from kvsearch.report.figures import ReportPart
    from kvsearch.report.screen import View

CATALOG = Path(__file__).with_name("flags.json")
HELP = "-h", "--help"
HELP_ALL = "--help-all"
CONTEXT_SETTINGS = {"help_option_names": [*HELP, HELP_ALL]}
METAVARS = {int: "N", float: "X", Path: "PATH", bool: ""}  # what stands for a value; everything else is a text
SHORT_HELP_LENGTH = 12  # options: the help of a verb with no more has them all
OPTIONS_PANEL = "Options"
GENERAL_PANEL = "General"
METHOD_PANEL = "Options of the method"
INTERRUPTED = 128 + signal.SIGINT
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or that of the copy that typer brings


@dataclass(frozen=True)
class Flag:
    """An argument or an option of a verb, as shown in its help.

    Args:
        name: of the field.
        help: what it does, with its default; empty of an option of earlier versions, which no help shows.
        flags: as they are typed; none of an argument.
        takes: what stands for the value; empty of a switch.
        panel: the heading that it is under in the full help.
        essential: its place in the short help; None: it is not there.
        repeated: every value has a flag of its own.
        methods: the methods that have it; none: it is an option of all.
        names: what may be typed, or "module:attribute" with the names.
    """

    name: str
    help: str
    flags: Sequence[str] = ()
    takes: str = ""
    panel: str = OPTIONS_PANEL
    essential: int | None = None
    repeated: bool = False
    methods: Sequence[str] = ()
    names: Sequence[str] | str = ()

    def make_parameter(self) -> inspect.Parameter:
        """Make the parameter that reads it; none is required, so that all problems are reported at once."""
        known = self.complete if self.names else None
        if self.flags:
            about = typer.Option(*self.flags, help=self.help, autocompletion=known, hidden=not self.help)
        else:
            about = typer.Argument(metavar=self.takes, help=self.help, autocompletion=known)
        value: Any = list[str] | None if self.repeated else str | None
        kind: Any = Annotated[value, about] if self.takes else Annotated[bool, about]
        default = None if self.takes else False
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    def complete(self, incomplete: str) -> list[str]:
        """List completions of a partially typed value; of several values the last is completed."""
        names = self.names
        if isinstance(names, str):
            listed = resolve_name(names)
            names = list(listed() if callable(listed) else listed)
        begin = max(incomplete.rfind(","), incomplete.rfind("+")) + 1
        return [incomplete[:begin] + name for name in names if name.startswith(incomplete[begin:])]


LAST_PLACE = 8  # in the short help
DRY_RUN = Flag(
    "dry_run", "Check everything and say what it costs, then stop.", ["--dry-run"], "", GENERAL_PANEL, LAST_PLACE
)
GENERAL_FLAGS = (
    Flag("as_json", "Print the result as JSON.", ["--json"], "", GENERAL_PANEL, LAST_PLACE),
    Flag("quiet", "No messages and no progress bars.", ["--quiet", "-q"], "", GENERAL_PANEL),
    Flag("verbose", "Say what is done, with times.", ["--verbose", "-v"], "", GENERAL_PANEL),
    Flag("log_file", "Write all that is said and done to the end of this file.", ["--log-file"], "PATH", GENERAL_PANEL),
    Flag("debug", "Show the traceback of an error.", ["--debug"], "", GENERAL_PANEL),
)
RECIPE = Flag(
    "recipe",
    "A YAML file of these options, a shipped one by name (see `kvsearch recipes`), or the config.json of a run; what "
    "is typed wins over it.",
    ["--recipe"],
    "FILE",
    names="kvsearch.config.recipes:list_shipped_recipes",
)


# --- from fields to flags ---------------------------------------------------------------------------------------------


def describe_flags(options: type[JobOptions]) -> list[Flag]:
    """Describe the arguments and options of a job in the order of the help, essential ones first."""
    methods = {name: kind.list_options() for name, kind in options.list_variants().items()}
    flags = []
    for name, (field, option) in options.list_options().items():
        kind = strip_annotation(field.annotation)
        is_plain = isinstance(field.default, (str, Path, int, float)) and not isinstance(field.default, bool)
        default = option.shown or (field.default if is_plain else None)
        takes = option.metavar or (name.upper() if option.argument else METAVARS.get(kind, "TEXT"))
        having = [method for method, offered in methods.items() if name in offered]
        flag = Flag(
            name,
            option.help if default in (None, "") else f"{option.help} [default: {default}]",
            [] if option.argument else [option.format_flag(name), *([option.short] if option.short else [])],
            takes if field.is_required() or not option.argument else f"[{takes}]",
            option.panel or OPTIONS_PANEL if len(having) == len(methods) else METHOD_PANEL,
            option.essential,
            option.repeated,
            having if len(having) < len(methods) else [],
            option.completes
            or list(methods if name == "method" else get_args(kind) if get_origin(kind) is Literal else ()),
        )
        flags.append(flag)
    flags += [Flag(name, "", [f"--{name}"], takes) for name, (takes, _) in options.former.items()]
    if options.recipes:
        flags.append(RECIPE)
    return sorted(flags, key=lambda flag: (bool(flag.flags), LAST_PLACE if flag.essential is None else flag.essential))


def strip_annotation(annotation: Any) -> Any:
    """Strip None and annotations from a type."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        (annotation, *_) = [item for item in get_args(annotation) if item is not NoneType]
        return strip_annotation(annotation)
    return annotation


def read_catalog(options: str) -> list[Flag]:
    """Read the flags of the options "module:class" from the catalog, without importing them."""
    return [Flag(*flag) for flag in json.loads(CATALOG.read_text(encoding="utf-8"))[options]]


# --- verbs ------------------------------------------------------------------------------------------------------------

Action = Callable[[Any, "Console"], None]


@dataclass(frozen=True)
class Verb:
    """A command: its name, help, options and action.

    Args:
        options: module and class, as in "kvsearch.commands.run:RunOptions"; imported when the verb runs.
        action: takes checked options and a console.
        forecast: the function in the module of the options that says what a dry run would cost, in place of the action.
        dry_run: whether it has that flag without a forecast: the action does a dry run itself.
        needs_arguments: whether the help is shown when nothing else is typed.
    """

    name: str
    help: str
    options: str
    action: Action
    forecast: str = ""
    dry_run: bool = False
    needs_arguments: bool = True

    def load_command(self, is_told: bool = False) -> VerbCommand:
        """Load the command from its options, or only for help and completion, without importing them."""
        flags = read_catalog(self.options) if is_told else describe_flags(resolve_name(self.options))
        if self.dry_run or self.forecast:
            flags.append(DRY_RUN)
        return make_command(self.name, self.help, [*flags, *GENERAL_FLAGS], self.run)

    def run(self, **values: Any) -> None:
        """Validate the typed values and run the action or its forecast; errors become messages and exit codes."""
        from kvsearch.cli.console import Console

        typed = {name: value for name, value in values.items() if value not in (None, False, [])}
        options: type[JobOptions] = resolve_name(self.options)
        general = (DRY_RUN, *GENERAL_FLAGS)
        console = Console(**{flag.name: typed.pop(flag.name) for flag in general if flag.name in typed})
        for name, (field, option) in options.list_options().items():
            kind = strip_annotation(field.annotation)
            if name in typed and kind in (int, float):
                with suppress(ValueError):  # a text that is no number is for the model to refuse
                    typed[name] = kind(typed[name])
            if name in typed and option.negated:
                typed[name] = False
        with console.reporting_failures():
            checked = options.of(**typed)
            if self.forecast and console.dry_run:
                module = self.options.partition(":")[0]
                print_forecast(resolve_name(f"{module}:{self.forecast}"), checked, console)
            else:
                self.action(checked, console)


MAIN_VERBS: dict[str, Verb] = {}
PLAN_VERBS: dict[str, Verb] = {}


def verb(options: str, *, group: dict[str, Verb] = MAIN_VERBS, **how: Any) -> Callable[[Action], Action]:
    """Register a function of checked options and a console; its docstring is the help. See `Verb` for the rest."""

    def register(action: Action) -> Action:
        name = action.__name__.replace("_", "-")
        group[name] = Verb(name, cleandoc(action.__doc__ or ""), options, action, **how)
        return action

    return register


def print_forecast(dry_run: Callable[..., View], options: Any, console: Console) -> None:
    """Print what a job would cost, as its function `dry_run` forecasts it."""
    from kvsearch.commands.public import run_job

    forecast = run_job(dry_run, options, console, dry=True)
    console.print_result(forecast.as_json, forecast.parts)


def list_kind_parts(kind: str, result: Any) -> Iterable[ReportPart]:
    """List what `kvsearch show` prints of the file of a result of this kind."""
    from kvsearch.report.artifacts import ARTIFACT_KINDS

    return ARTIFACT_KINDS[kind].parts(result)


# --- from flags to commands -------------------------------------------------------------------------------------------


def make_command(name: str, words: str, flags: Iterable[Flag], run: Callable[..., None]) -> VerbCommand:
    """Make a command whose help begins with `words`; `run` takes the values of all flags by field name."""
    parameters = [flag.make_parameter() for flag in flags]
    typed: Any = partial(run)  # that has a signature of its own
    typed.__signature__ = inspect.Signature(parameters)
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, cls=VerbCommand, help=words, context_settings=CONTEXT_SETTINGS)(typed)
    command = cast("VerbCommand", typer.main.get_command(app))
    command.flags = list(flags)
    return command


class VerbCommand(TyperCommand):
    """A command with a short and a full help."""

    flags: Sequence[Flag] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember the typed arguments, on which the help depends."""
        ctx.meta["kvsearch.typed"] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short or full help, with the options of a method if it is typed."""
        words = " ".join(ctx.meta["kvsearch.typed"]).replace("=", " ").split()
        method = words[words.index("--method") + 1] if "--method" in words[:-1] else ""
        shared = [flag for flag in self.flags if not flag.methods and flag.help]
        of_method = [flag for flag in self.flags if method in flag.methods]
        short = [flag for flag in shared if flag.essential is not None or not flag.flags]
        if sum(flag.panel != GENERAL_PANEL for flag in shared) <= SHORT_HELP_LENGTH:
            short = shared
        sections = {OPTIONS_PANEL: short, METHOD_PANEL: of_method}
        notes = []
        if HELP_ALL in words:
            listed = sorted([*shared, *of_method], key=lambda flag: flag.panel == GENERAL_PANEL)
            sections = {flag.panel: [other for other in listed if other.panel == flag.panel] for flag in listed}
        elif short is not shared:
            notes.append(f"All options: {ctx.command_path} {HELP_ALL}")
        if any(flag.methods for flag in self.flags) and not of_method:
            notes.append(f"Options of one method: {ctx.command_path} --method NAME -h")
        arguments = [flag.takes for flag in shared if not flag.flags]
        formatter.write_usage(ctx.command_path, " ".join([*arguments, "[OPTIONS]"]))
        self.format_help_text(ctx, formatter)
        for panel, flags in sections.items():
            if flags:
                with formatter.section(panel):
                    formatter.write_dl([(f"{', '.join(flag.flags)} {flag.takes}".strip(), flag.help) for flag in flags])
        for note in notes:
            formatter.write_paragraph()
            formatter.write_text(note)


@contextmanager
def _report_usage_errors() -> Iterator[None]:
    """Report unknown options and verbs in one line, as all other errors."""
    try:
        yield
    except BrokenPipeError:  # whoever read the help has seen enough
        raise typer.Exit from None
    except KeyboardInterrupt as error:  # before a verb runs, which says more
        typer.echo("kvsearch: error: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from error
    except _UsageError as error:
        if "NoArgs" in type(error).__name__:
            raise
        more = "" if error.ctx is None else f" (see `{error.ctx.command_path} -h`)"
        typer.echo(f"kvsearch: error: {truncate_lines(error.format_message())}{more}", err=True)
        raise typer.Exit(UsageError.exit_code) from error


class VerbGroup(TyperGroup):
    """A group of commands that are loaded when one of them runs."""

    verbs: Mapping[str, Verb] = {}

    def make_context(self, *given: Any, **more: Any) -> Any:
        """Parse the options before the verb."""
        with _report_usage_errors():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest, and run the verb."""
        with _report_usage_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the stand-in of the command that is run, asked for help or completed."""
        if args and args[0] in self.verbs:
            verb = self.verbs[args[0]]
            if args[1:] == [] and verb.needs_arguments and not ctx.resilient_parsing:
                args = [*args, HELP[0]]
            is_told = ctx.resilient_parsing or not {*HELP, HELP_ALL}.isdisjoint(args)
            self.commands[args[0]] = verb.load_command(is_told)
        return super().resolve_command(ctx, args)


def make_group(name: str, words: str, verbs: Mapping[str, Verb], **how: Any) -> typer.Typer:
    """Make the app of a group of verbs, without importing their modules."""
    group = type("Group", (VerbGroup,), {"verbs": verbs})
    app = typer.Typer(
        name=name,
        cls=group,
        help=words,
        no_args_is_help=True,
        rich_markup_mode=None,  # rich takes as long to import as all else
        context_settings=CONTEXT_SETTINGS,
        pretty_exceptions_enable=False,
        **how,
    )
    for verb in verbs.values():
        app.command(verb.name, short_help=verb.help.partition("\n\n")[0].replace("\n", " "))(lambda: None)
    return app
