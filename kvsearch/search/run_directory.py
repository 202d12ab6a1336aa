"""The directory of a search: its configuration first, then all that it does line by line, at the end the plan.

config.json    what is searched, by content: settings, model, code, hashes of data and splits
ledger.jsonl   what was asked, measured and told, see `ledger`
best.json      the best plan so far
report.json    the result, as `--json` prints it
plan.json      the plan
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvsearch.errors import UsageError
from kvsearch.evaluation.run_directory import TEMPORARY, difference
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.files import atomic_write, read_bytes, save_plan
from kvsearch.plan.parsing import parse_json
from kvsearch.plan.schema import Plan
from kvsearch.search.ledger import Ledger, fault

CONFIG_SCHEMA = "kvsearch.search.config/1"
CONFIG, LEDGER = "config.json", "ledger.jsonl"
BEST, REPORT, PLAN = "best.json", "report.json", "plan.json"
OWN = (BEST, REPORT, PLAN, "plan-*.json", "front.json", "choice", "choice-*", "report")  # files, folders of replies
SCHEMA = "schema"
EXECUTION = "execution"  # the part of a configuration that may change from session to session


@dataclass(frozen=True)
class SearchRun:
    """An open run; the files are replaced in one step, so a reader never sees half of one.

    All `write_*` raise EnvironmentFault if the disk is full or permissions are missing; what was there is kept.
    """

    directory: Path
    ledger: Ledger

    def __enter__(self) -> SearchRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ledger.close()

    def write_best(self, best: Mapping[str, object]) -> None:
        """Write what is the best so far."""
        atomic_write(self.directory / BEST, canonical_json(best))

    def write_report(self, report: Mapping[str, object]) -> None:
        """Write the result."""
        atomic_write(self.directory / REPORT, canonical_json(report))

    def write_plan(self, plan: Plan) -> None:
        """Write the plan; equal plans give equal bytes."""
        save_plan(plan, self.directory / PLAN, overwrite=True)


def check_directory(directory: Path, resume: bool = False, force: bool = False) -> None:
    """Find out, before a model is loaded, whether a search can be kept in `directory`; see `open_search`."""
    if resume and force:
        raise UsageError("--resume goes on with a search and --force starts it anew: give one of them")
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file: give a directory to write to")
    if _config_of(directory) is None:
        if not _is_empty(directory):
            raise UsageError(f"{directory} holds something else than a search: choose another directory")
    elif not resume and not force:
        raise UsageError(
            f"{directory} holds a search already: --resume to go on with it, --force to start anew, "
            "or choose another directory"
        )


def open_search(directory: Path, config: Mapping[str, object], resume: bool = False, force: bool = False) -> SearchRun:
    """Begin a search in `directory`, or go on with the one that is there; to be closed by the caller.

    `resume` goes on where there is something to go on with, and begins where there is nothing yet. `force` starts anew
    whatever search is there. `config` is all that decides the result. Its part `EXECUTION` is not compared, and the
    file then has the new one: limits, executor and workers may differ from session to session.

    Raises:
        UsageError: a search is there and neither `resume` nor `force` is given, or one of another configuration (the
            message names the first difference), or something else than a search; a damaged ledger; another process
            writes to it.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    check_directory(directory, resume, force)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fault(error, directory) from error
    # The ledger first: it keeps other processes out, and an old one must not get a new configuration.
    ledger = Ledger(directory / LEDGER, anew=force)
    try:
        if force:
            _clear(directory)
        elif (there := _config_of(directory)) is not None:
            check_directory(directory, resume)  # again: another process may have been here since
            _require_same(directory, there, _written(config))
        atomic_write(directory / CONFIG, canonical_json(_written(config)))  # makes the name of the ledger durable, too
    except BaseException:
        ledger.close()
        raise
    return SearchRun(directory, ledger)


def _written(config: Mapping[str, object]) -> dict[str, object]:
    return {**config, SCHEMA: CONFIG_SCHEMA}


def require_same(directory: Path, config: Mapping[str, object]) -> None:
    """UsageError, naming the first difference, if the search in `directory` is another one; fine if there is none."""
    there = _config_of(directory)
    if there is not None:
        _require_same(directory, there, _written(config))


def _clear(directory: Path) -> None:
    """Remove what the search that was here has written besides its ledger and configuration."""
    for pattern in OWN:
        for path in directory.glob(pattern):
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except OSError as error:
                raise fault(error, path) from error


def _config_of(directory: Path) -> Mapping[str, object] | None:
    """The configuration of the search in `directory`; None if there is none, or that of something else."""
    if not (directory / CONFIG).exists():
        return None
    found = parse_json(read_bytes(directory / CONFIG), str(directory / CONFIG))
    return found if isinstance(found, dict) and found.get(SCHEMA) == CONFIG_SCHEMA else None


def _is_empty(directory: Path) -> bool:
    """Whether nothing is there but what a search leaves that was killed before its configuration was written."""
    for item in directory.iterdir():
        begun = item.name == LEDGER and item.is_file() and item.stat().st_size == 0
        if not begun and not item.name.startswith(TEMPORARY):
            return False
    return True


def _require_same(directory: Path, there: Mapping[str, object], config: Mapping[str, object]) -> None:
    now = parse_json(canonical_json(config), "the configuration")
    found = difference(_compared(there), _compared(now))
    if found is not None:
        raise UsageError(
            f"{directory} holds another search: {found}; repeat its command to go on with it, --force to start anew, "
            "or choose another directory"
        )


def _compared(config: object) -> object:
    return {key: value for key, value in config.items() if key != EXECUTION} if isinstance(config, dict) else config
