"""A run: a directory that has its configuration, what is finished of it, and in the end its results.

Whether a command may go on in a directory is decided here, for all jobs by the same rule:

- nothing is there: the run begins;
- the same run is there (equal job and content, see `RunConfig`): it goes on, or is finished already;
- another run of the job is there: it is refused with the first difference, or begun anew with `force`;
- anything else is there: it is refused, with `force` or without.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Record, Sha256
from kvsearch.core.files import TEMPORARY, open_file, read_text, require_directory, write_atomically, write_fault
from kvsearch.core.parsing import read_json, require_header, validate_content
from kvsearch.plan.origin import Use
from kvsearch.runs.identity import CONFIG, CONTEXTS, LEDGER, SUMS, Job, RunConfig, read_config
from kvsearch.runs.ledger import Ledger
from kvsearch.runs.lock import lock_directory, require_lock

RunState = Literal["new", "unfinished", "finished"]
AnyLedger = TypeVar("AnyLedger", bound=Ledger[Any])


@dataclass(frozen=True)
class Run:
    """A run that may be written: its process has the lock of the directory.

    Args:
        directory: where it is kept.
        config: what is run.
        state: how far it was when it was opened: a finished run has been sealed with checksums.
        earlier: the configuration of the session before, of the same run; None where it is new.
        files: the patterns of what the run writes beside its configuration and ledger.
    """

    directory: Path
    config: RunConfig
    state: RunState
    earlier: RunConfig | None
    files: Sequence[str]

    @classmethod
    @contextmanager
    def open(
        cls, directory: Path, config: RunConfig, *, force: bool = False, files: Sequence[str] = ()
    ) -> Iterator[Run]:
        """Begin a run, or go on with the one that is there; its configuration is written, its checksums are not valid.

        Args:
            directory: of the run.
            config: of the run.
            force: whether the files of an earlier run of this job are removed first, whatever its configuration.
            files: patterns of what the run writes beside its configuration and ledger.

        Raises:
            UsageError: another run is there, or something else; another process writes there.
            EnvironmentFault: the disk is full, permissions are missing.
        """
        with lock_directory(directory):
            earlier: RunConfig | None = None
            state: RunState = "new"
            if force:
                read_run(directory, config.job)  # what is no run of this job is not replaced
            else:
                earlier = require_same(directory, config)
            if earlier is not None:
                state = "finished" if CONFIG in read_sums(directory) else "unfinished"
            begin_run(directory, config, (LEDGER, *files) if force else ())
            yield cls(directory, config, state, earlier, files)

    def open_ledger(self, kind: Callable[[Path], AnyLedger]) -> AnyLedger:
        """Return the ledger of the run, opened as `kind`; errors as for `Ledger`."""
        return kind(self.directory / LEDGER)

    def write(self, name: str, content: object) -> None:
        """Write a result; errors as for `write_json`."""
        write_json(self.directory / name, content)

    def finish(self) -> None:
        """Seal the run with the checksums of all that it has written; errors as for `sums.finish`."""
        finish_run(self.directory, (CONFIG, LEDGER, *self.files))


def require_same(directory: Path, config: RunConfig, unknown: Sequence[str] = ()) -> RunConfig | None:
    """Return the configuration of the run in `directory`, which is the same run; None if nothing is there.

    `unknown` are keys of the content that are left out, as the job finds out their values later.

    Raises:
        UsageError: another run is there, with the first difference, or something else; see `read_run`.
    """
    earlier = read_run(directory, config.job)
    if earlier is not None:
        require_equal(directory, earlier, config, unknown)
    return earlier


def require_equal(directory: Path, earlier: RunConfig, config: RunConfig, unknown: Sequence[str] = ()) -> None:
    """Raise UsageError, with the first difference, if the run that is in `directory` is another one."""
    difference = config.difference(earlier, unknown)
    if difference is not None:
        raise UsageError(
            f"{directory} holds another run: {difference}; repeat its command to go on with it, choose another "
            "--output, or --force to start anew"
        )


JOB_NOUNS: dict[Job, str] = {
    "calibrate": "a calibration", "headroom": "a result of headroom", "evaluate": "an evaluation",
    "validate": "a validation", "select": "a selection", "evolve": "a search", "run": "a run",
}  # fmt: skip


@contextmanager
def lock_for_writing(directory: Path) -> Iterator[None]:
    """Lock `directory` against other processes before anything is read from it; errors as `lock_directory`.

    A run that has no more than begun when it is found that it cannot be done as asked leaves nothing.
    """
    with lock_directory(directory):
        was_unused = is_unused(directory)
        try:
            yield
        except UsageError:
            if was_unused and all(item.name == CONFIG for item in directory.iterdir() if not _is_nothing(item)):
                for item in directory.iterdir():
                    if item.name in (CONFIG, LEDGER):
                        item.unlink()
            raise


def read_run(directory: Path, job: Job) -> RunConfig | None:
    """Return the configuration of the run that is in `directory`; None if nothing is.

    Raises:
        UsageError: it is a file, it holds something else than a run of this job, or the configuration is damaged.
    """
    require_directory(directory)
    config = read_config(directory)
    if config is None and is_unused(directory):
        return None
    if config is None or config.job != job:
        raise UsageError(
            f"{directory} holds something else than {JOB_NOUNS[job]}: choose another directory (--force replaces only "
            f"{JOB_NOUNS[job]})"
        )
    return config


def is_unused(directory: Path) -> bool:
    """Return True if nothing is there but what a run leaves that was killed before it had written its configuration."""
    return not directory.exists() or all(map(_is_nothing, directory.iterdir()))


def _is_nothing(item: Path) -> bool:
    """Return True for a temporary file, and for a ledger without a line."""
    return item.name.startswith(TEMPORARY) or (item.name == LEDGER and item.is_file() and item.stat().st_size == 0)


def begin_run(directory: Path, config: RunConfig, clear: Iterable[str] = ()) -> None:
    """Remove what an earlier run has left under the names `clear` (patterns), then write the configuration.

    Raises:
        EnvironmentFault: the disk is full, permissions are missing; see also `require_lock`.
    """
    require_lock(directory)
    mark_unfinished(directory)
    for path in [path for pattern in clear for path in sorted(directory.glob(pattern))]:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise write_fault(error, path, "give the same command again") from error
    write_atomically(directory / CONFIG, config.to_bytes())


def write_json(path: Path, content: object) -> None:
    """Write a result; equal content gives equal bytes. Errors as for `require_lock` and `write_atomically`."""
    require_lock(path.parent)
    write_atomically(path, canonical_json(content))


# a name that can lead to a file below the directory
_LINE = re.compile(r"([0-9a-f]{64}) [ *]((?!/|.*\.\.)[ -\[\]-~]{1,200})")


def finish_run(directory: Path, patterns: Sequence[str]) -> None:
    """Write the checksums of the files in `directory` that match, and of all files in folders that do.

    Patterns match names, not paths.
    The lines of other jobs stay. Files that are written while a job works, and the sums of other runs, have none.

    Raises:
        UsageError: the file of the checksums is damaged.
        EnvironmentFault: a file cannot be read, or the disk is full.
    """
    sums = _keep_others(directory, patterns)
    places = {path for pattern in patterns for path in directory.glob(pattern)}
    for place in places:
        for file in place.rglob("*") if place.is_dir() else [place]:
            name = str(file.relative_to(directory))
            is_listed = not file.name.startswith((SUMS, TEMPORARY)) and _LINE.fullmatch(f"{'0' * 64}  {name}")
            if is_listed and file.is_file():
                sums[name] = hash_file(file)
    _write(directory, sums)


def mark_unfinished(directory: Path, patterns: Sequence[str] | None = None) -> None:
    """Remove the checksums of matching files (None: all) before a job rewrites them; errors as `finish_run`."""
    if (directory / SUMS).exists():
        _write(directory, {} if patterns is None else _keep_others(directory, patterns))


def require_unchanged(directory: Path, name: str, remedy: str) -> None:
    """Raise UsageError, with the remedy, if a finished file is not as it was; see also `read_sums`.

    A job that goes on from a file asks this before it begins, as its own checksum of it would hide the change.
    """
    if not (directory / name).exists():
        return
    digest = read_sums(directory).get(name)
    if digest is not None and hash_file(directory / name) != digest:
        raise UsageError(f"{directory / name} was changed since it was finished, {SUMS} has another one: {remedy}")


def read_sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the finished files, by name from `directory`; nothing if nothing is finished.

    Raises:
        UsageError: a line is damaged.
        EnvironmentFault: the file cannot be read.
    """
    path = directory / SUMS
    if not path.exists():
        return {}
    sums: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise UsageError(f"{path}, line {number} is damaged: delete the file and repeat the command of the run")
        sums[match[2]] = match[1]
    return sums


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, which is read piece by piece; errors as `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _keep_others(directory: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return the lines of files that do not match, nor the folders that they are in."""
    known = read_sums(directory)
    return {
        name: known[name]
        for name in known
        if not any(fnmatchcase(Path(name).parts[0], pattern) for pattern in patterns)
    }


def _write(directory: Path, sums: Mapping[str, str]) -> None:
    path = directory / SUMS
    if sums:
        write_atomically(path, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode())
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_fault(error, path, "give the same command again") from error


# --- the contexts that a run asked --------------------------------------------------------------------------------

CONTEXTS_FORMAT, CONTEXTS_VERSION = "kvsearch.contexts", 1


class ContextsFile(Record):
    """The hashes of the contexts that a run asked, by use, ascending."""

    format: Literal["kvsearch.contexts"] = "kvsearch.contexts"
    version: Literal[1] = 1
    fitted: tuple[Sha256, ...] = ()
    chosen: tuple[Sha256, ...] = ()
    reported: tuple[Sha256, ...] = ()


def write_contexts(directory: Path, hashes: Mapping[Use, Iterable[str]]) -> None:
    """Write the hashes of a run's contexts into its directory; errors as for `require_lock` and `write_atomically`."""
    require_lock(directory)
    content = ContextsFile.model_validate({use: tuple(sorted(set(of_use))) for use, of_use in hashes.items()})
    write_atomically(directory / CONTEXTS, canonical_json(content))


def read_contexts(directory: Path) -> ContextsFile:
    """Read the hashes of a run's contexts.

    Raises:
        UsageError: there is no such file, or it is not valid.
        EnvironmentFault: it cannot be read.
    """
    path = directory / CONTEXTS
    data = require_header(read_json(path), CONTEXTS_FORMAT, CONTEXTS_VERSION, str(path))
    return validate_content(ContextsFile.model_validate, data, str(path))
