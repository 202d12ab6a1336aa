"""The directory of a run: its configuration first, then its ledger, at the end the results.

config.json    what is run, see `kvsearch.runs.identity`
ledger.jsonl   what is done so far, see `kvsearch.runs.ledger`

Who writes there has the lock, see `writing`: what writes a file of a run makes sure of that. Files are replaced in one
step: no reader sees half of one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsearch.errors import UsageError
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.files import atomic_write, write_fault
from kvsearch.plan.temporary import TEMPORARY
from kvsearch.runs.identity import CONFIG, Job, RunConfig, read_config
from kvsearch.runs.lock import locked, refuse_locked, require_lock
from kvsearch.runs.sums import unfinish

__all__ = ["CONFIG", "LEDGER", "begin", "check_directory", "is_unused", "run_in", "write_json", "writing"]

LEDGER = "ledger.jsonl"
NOUNS: dict[Job, str] = {
    "calibrate": "a calibration", "evaluate": "an evaluation", "validate": "a validation", "select": "a selection",
    "evolve": "a search", "run": "a run",
}  # fmt: skip


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to `directory`, before anything is read there; see `locked` for the errors.

    A run that has no more than begun when it is found that it cannot be done as asked leaves nothing.
    """
    with locked(directory):
        was_unused = is_unused(directory)
        try:
            yield
        except UsageError:
            if was_unused and all(item.name == CONFIG for item in directory.iterdir() if not _is_nothing(item)):
                for item in directory.iterdir():
                    if item.name in (CONFIG, LEDGER):
                        item.unlink()
            raise


def check_directory(directory: Path, job: Job) -> RunConfig | None:
    """Find out, before a model is loaded, whether a run can be kept in `directory`; see `run_in`.

    Raises:
        UsageError: as `run_in`, or another process is writing there.
    """
    refuse_locked(directory)
    return run_in(directory, job)


def run_in(directory: Path, job: Job) -> RunConfig | None:
    """Return the configuration of the run that is in `directory`; None if nothing is.

    Raises:
        UsageError: it is a file, it holds something else than a run of this job, or the configuration is damaged.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: give a directory to write to")
    found = read_config(directory)
    if found.job != job if found is not None else not is_unused(directory):
        raise other_kind(directory, job)
    return found


def other_kind(directory: Path, job: Job) -> UsageError:
    """Return what to say of a directory that holds something else than a run of `job`, which no `force` replaces."""
    return UsageError(
        f"{directory} holds something else than {NOUNS[job]}: choose another directory, --force replaces only those of "
        "this kind"
    )


def is_unused(directory: Path) -> bool:
    """Tell whether nothing is there but what a run leaves that was killed before it had written its configuration."""
    return not directory.exists() or all(map(_is_nothing, directory.iterdir()))


def _is_nothing(item: Path) -> bool:
    """Tell whether a file is a temporary one, or a ledger without a line."""
    return item.name.startswith(TEMPORARY) or (item.name == LEDGER and item.is_file() and item.stat().st_size == 0)


def begin(directory: Path, config: RunConfig, clear: Iterable[str] = ()) -> None:
    """Remove what an earlier run has left under the names `clear` (patterns), then write the configuration.

    Raises:
        EnvironmentFault: the disk is full, permissions are missing; see also `require_lock`.
    """
    require_lock(directory)
    unfinish(directory)
    for path in [path for pattern in clear for path in sorted(directory.glob(pattern))]:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise write_fault(error, path, "give the same command again") from error
    atomic_write(directory / CONFIG, config.to_bytes())


def write_json(path: Path, content: object) -> None:
    """Write a result; equal content gives equal bytes. Errors as for `require_lock` and `atomic_write`."""
    require_lock(path.parent)
    atomic_write(path, canonical_json(content))
