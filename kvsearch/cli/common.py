"""What every command shares: its options, its two output channels, its exit codes.

Data goes to standard output, talk to standard error. Exit codes: 0 done, 1 our bug, 2 usage or configuration, 3 the
environment, 4 model or data incompatible, 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.errors import EnvironmentFault, KvsearchError, KvsearchWarning
from kvsearch.models.memory import is_out_of_memory
from kvsearch.models.offline import stay_offline

if TYPE_CHECKING:
    from rich.console import Console

    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan

Progress = Callable[[int, int], None]
BUG, INTERRUPTED = 1, 130
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Common:
    """The options every command takes."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="Spread the model over several GPUs: auto, balanced, sequential.")
    ] = None
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0)] = 0
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a model brings along.")
    ] = False
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No talk and no progress bars.")] = False
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="More talk.")] = 0
    log_file: Annotated[Path | None, typer.Option(help="Write a log to this file.")] = None
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what would be done, then stop.")
    ] = False

    @functools.cached_property
    def talk(self) -> Console:
        """The console for people, on standard error."""
        from rich.console import Console

        return Console(stderr=True, quiet=self.quiet, highlight=False)

    @functools.cached_property
    def out(self) -> Console:
        """The console for results, on standard output; wide enough for a table when it is not a terminal."""
        from rich.console import Console

        class Output(Console):
            def on_broken_pipe(self) -> None:  # rich would exit with 1
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise BrokenPipeError

        return Output(highlight=False, width=None if sys.stdout.isatty() else 160)

    def say(self, text: str) -> None:
        """Tell the user something that is not a result."""
        self.talk.print(text, markup=False, soft_wrap=True)
        logging.getLogger("kvsearch").info(text)

    def warn(self, text: str) -> None:
        """Tell the user of something doubtful, on one line."""
        self.talk.print(f"kvsearch: warning: {text}", markup=False, soft_wrap=True)
        logging.getLogger("kvsearch").warning(text)

    @contextmanager
    def warnings_shown(self) -> Iterator[None]:
        """Show our warnings as `warn` does; those of other packages are shown as ever."""
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, KvsearchWarning):
                    self.warn(str(message))
                else:
                    show_others(message, category, *place, **more)

            warnings.showwarning = show
            warnings.simplefilter("always", KvsearchWarning)
            yield

    def print_json(self, data: Any) -> None:
        """Print a result as JSON on standard output."""
        sys.stdout.write(json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n")

    def load(self, model: str) -> LoadedModel:
        """Load a model as these options say."""
        from kvsearch.models.loading import LoadOptions, load

        _silence_libraries(self.verbose)
        options = LoadOptions(
            self.device, self.device_map, self.dtype, self.revision, self.trust_remote_code, self.offline
        )
        return load(model, options)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A progress bar with the time left, on a terminal; nothing elsewhere."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Bars(*columns, console=self.talk, disable=self.quiet or not sys.stderr.isatty()) as bars:
            task = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the common options (passed on as `common`) and turn errors into messages and exit codes.

    A parameter of a dataclass, as `common` is one, stands for the options that are its fields. They are in its place;
    the common ones come last.
    """
    own = inspect.signature(function, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in own.items()}
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name in [*(name for name in own if name != "common"), "common"]:
        flat += _options(groups[name]) if name in groups else [own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @functools.wraps(function)
    def wrapped(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        code = guarded(lambda: function(**values), values["common"])
        if code:
            raise typer.Exit(code)

    wrapped.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in flat}
    return wrapped


def _options(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters."""
    hints = inspect.get_annotations(group, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


def guarded(action: Callable[[], None], common: Common) -> int:
    """Run `action`; returns the exit code and prints one line about what went wrong, if anything."""
    try:
        _log_to(common.log_file)
        with stay_offline(common.offline), common.warnings_shown():
            action()
    except KeyboardInterrupt:
        _complain("interrupted: nothing half-written was left behind")
        return INTERRUPTED
    except KvsearchError as error:
        return _failed(str(error), error, error.exit_code, common)
    except BrokenPipeError:
        return 0  # whoever read our output has seen enough
    except OSError as error:
        what = "the disk is full" if error.errno in OUT_OF_SPACE else error.strerror or str(error)
        where = f": {error.filename}" if error.filename else ""
        return _failed(f"{what}{where}", error, EnvironmentFault.exit_code, common)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must not look like a usage error
        if is_out_of_memory(error):
            return _failed("out of memory: use a smaller --batch, model or --dtype", error, 3, common)
        return _failed(f"a bug in kvsearch, please report it ({type(error).__name__}: {error})", error, BUG, common)
    return 0


def _failed(message: str, error: BaseException, code: int, common: Common) -> int:
    logging.getLogger("kvsearch").error(message, exc_info=error)
    if common.debug:
        traceback.print_exception(error)
    _complain(message)
    return code


def _complain(message: str) -> None:
    # errors are shown even when talk is not wanted
    sys.stderr.write(f"kvsearch: error: {message}\n")


def _log_to(path: Path | None) -> None:
    logger = logging.getLogger("kvsearch")
    logger.propagate = False
    logger.handlers = [logging.NullHandler()]
    logger.setLevel(logging.INFO)
    if path is None:
        return
    from kvsearch.plan.files import check_target

    check_target(path)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def _silence_libraries(verbose: int) -> None:
    if verbose:
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def checked_plan(path: Path) -> Plan:
    """Read a plan file; UsageError for all that is wrong with it or its policies, so that no model is loaded for it."""
    from kvsearch.plan import load_plan
    from kvsearch.runtime.plan_checks import check_plan

    plan = load_plan(path)
    check_plan(plan, str(path))
    return plan
