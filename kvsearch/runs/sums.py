"""Checksums of the files that a job has finished, in its directory, as `sha256sum --check SHA256SUMS` reads them.

A job takes the lines of its own files out when it begins and writes them as its last act. So what has no line is not
finished, and a file whose line does not fit was changed since.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan.files import atomic_write, read_text, write_fault
from kvsearch.plan.limits import MOST_PATH
from kvsearch.plan.temporary import TEMPORARY

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\\\r\n]+)")
_PIECE = 1 << 20


def finish(directory: Path, patterns: Sequence[str]) -> None:
    """Write the checksums of the files in `directory` that match, and of all files in folders that do.

    Patterns are those of names, not of paths.
    The lines of other jobs stay. Files that are written while a job works, and the sums of other runs, have none.

    Raises:
        UsageError: the file of the checksums is damaged.
        EnvironmentFault: a file cannot be read, or the disk is full.
    """
    found = {name: sha256_of_file(directory / name) for name in _files(directory, patterns)}
    _write(directory, {**_others(directory, patterns), **found})


def finish_late(directory: Path, name: str, patterns: Sequence[str]) -> None:
    """Do as `finish` where the finished file of that name has no checksum: its job was stopped before its last act."""
    if name not in read_sums(directory):
        finish(directory, patterns)


def unfinish(directory: Path, patterns: Sequence[str] | None = None) -> None:
    """Take the lines of what matches out again, None: all, as a job begins that writes it; errors as for `finish`."""
    if (directory / SUMS).exists():
        _write(directory, {} if patterns is None else _others(directory, patterns))


def require_unchanged(directory: Path, name: str, remedy: str) -> None:
    """Raise UsageError, with the remedy, if a finished file is not as it was; see also `read_sums`.

    A job that goes on from a file asks this before it begins, as its own checksum of it would hide the change.
    """
    digest = read_sums(directory).get(name)
    if digest is not None and (directory / name).exists() and sha256_of_file(directory / name) != digest:
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
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in found or not _inside(match[2]):
            raise UsageError(f"{path}, line {number} is damaged: delete the file and repeat the command of the run")
        found[match[2]] = match[1]
    return found


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, which is read piece by piece; EnvironmentFault if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    return digest.hexdigest()


def _inside(name: str) -> bool:
    """Tell whether a name may lead to a file below the directory."""
    path = Path(name)
    possible = len(name) <= MOST_PATH and "\0" not in name and all(len(part.encode()) <= 255 for part in path.parts)
    return possible and not path.is_absolute() and ".." not in path.parts


def _files(directory: Path, patterns: Sequence[str]) -> list[str]:
    places = {path for pattern in patterns for path in directory.glob(pattern)}
    files = {file for place in places for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file()}
    names = (str(file.relative_to(directory)) for file in files if not _is_left_out(file))
    return sorted(name for name in names if _LINE.fullmatch(f"{'0' * 64}  {name}"))


def _is_left_out(file: Path) -> bool:
    return file.name == SUMS or file.name.startswith(TEMPORARY)


def _others(directory: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return the lines of files that do not match, nor the folders that they are in."""
    known = read_sums(directory)
    return {name: known[name] for name in known if not any(fnmatchcase(Path(name).parts[0], one) for one in patterns)}


def _write(directory: Path, sums: Mapping[str, str]) -> None:
    path = directory / SUMS
    if sums:
        atomic_write(path, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode())
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_fault(error, path, "give the same command again") from error
