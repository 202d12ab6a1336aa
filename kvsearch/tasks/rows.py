"""Rows of public datasets: from the Hugging Face hub, or from the files a user already has."""

from __future__ import annotations

import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from kvsearch.core.errors import EnvironmentFault, KvsearchError, KvsearchWarning, UsageError, given
from kvsearch.core.files import read_bytes
from kvsearch.core.limits import MOST_DATA
from kvsearch.core.parsing import describe_fault, list_problems, parse_json, problems_of, short_key

Row = dict[str, Any]
Checked = TypeVar("Checked", bound=BaseModel)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 20  # columns in a message


@dataclass(frozen=True)
class Dataset:
    """Where a dataset is on the hub, and under which names its files are looked for in a user's folder.

    `files` are patterns without a suffix, the first with a match is read. Where the hub has the rows in a zip
    `archive`, `members` are the names they may have in it; where it has them in one `file`, that is fetched. `hub` is
    its id there; empty: there is none.
    """

    config: str = "default"
    split: str = "test"
    files: Sequence[str] = ("test", "test-*")
    archive: str | None = None
    members: Sequence[str] = ()
    file: str | None = None
    hub: str = ""

    def named(self, name: str) -> Dataset:
        """Return the dataset with its name in place of every `{name}`."""

        def put(text: str) -> str:
            return text.replace("{name}", name)

        return replace(
            self,
            config=put(self.config),
            split=put(self.split),
            files=tuple(map(put, self.files)),
            members=tuple(map(put, self.members)),
            file=None if self.file is None else put(self.file),
        )


def load_rows(dataset: Dataset, source: str | Path, revision: str | None = None) -> list[Row]:
    """Return the rows of `dataset` from `source`: a file, a folder, or a dataset id of the hub.

    Raises:
        UsageError: there is no such file, folder, dataset or revision, or it does not hold this dataset.
        EnvironmentFault: the hub cannot be reached, or a file cannot be read.
    """
    path = Path(source)
    if not path.exists():
        if not _HUB_ID.fullmatch(str(source)):
            raise UsageError(f"there is no file or folder {source}: check the path")
        return _from_hub(dataset, str(source), revision)
    if revision is not None:
        raise UsageError(f"{source} is on this machine and has no revision {revision!r}: leave the revision out")
    if path.is_dir():
        return _from_folder(dataset, path)
    return read_archive(path, dataset.members) if path.suffix == ".zip" and dataset.members else read_file(path)


load_shared_rows = lru_cache(maxsize=1)(load_rows)  # of a file that several tasks have theirs in: it is read once


def check_rows(rows: Sequence[Row], model: type[Checked], where: object) -> list[Checked]:
    """Return the rows as `model`s.

    Raises:
        UsageError: a column is missing, or rows hold something else than text, numbers or lists as `model` says.
    """
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    checked = []
    problems = []
    for number, row in enumerate(rows, 1):
        missing = ", ".join(repr(name) for name in needed if name not in row)
        if missing:
            columns = ", ".join(map(short_key, [*row][:_SHOWN])) or "nothing"
            raise UsageError(f"row {number} of {where} has no column {missing} (found: {columns})")
        try:
            checked.append(model.model_validate(row))
        except ValidationError as error:
            problems += [f"row {number}: {problem}" for problem in problems_of(error)]
    if problems:
        raise UsageError(list_problems(problems, str(where)))
    return checked


def usable(rows: Sequence[Checked], fault: Callable[[Checked], str | None], where: object) -> list[tuple[int, Checked]]:
    """Return the rows without a `fault`, with their positions; a KvsearchWarning counts the others by what is wrong.

    Raises:
        UsageError: there is none.
    """
    faults = [fault(row) for row in rows]
    counts = Counter(reason for reason in faults if reason is not None)
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    remaining = [(position, row) for position, row in enumerate(rows) if faults[position] is None]
    if not remaining:
        raise UsageError(f"{where} has no usable row" + (f": {listed}" if listed else ""))
    if counts:
        message = f"{where}: {counts.total()} of {len(rows)} rows left out: {listed}"
        warnings.warn(message, KvsearchWarning, stacklevel=2)
    return remaining


def read_file(path: Path) -> list[Row]:
    """Return all rows of one file; its suffix says what it is.

    Raises:
        UsageError: another suffix, no such file, or content that is not what the suffix says.
        EnvironmentFault: the file cannot be read.
    """
    reader = READERS.get(path.suffix.lower())
    return given(reader, f"{path} is no file of rows: give one of {', '.join(READERS)}")(path)


def parse_rows(data: bytes, name: str) -> list[Row]:
    """Return the rows of a JSON text: an array of objects, or an object per line.

    Raises:
        UsageError: not JSON, or a row that is not an object; the message names the line.
    """
    if data.lstrip()[:1] == b"[":
        array = cast("list[object]", parse_json(data, name))
        parsed = [(f"{name} row {number}", row) for number, row in enumerate(array, 1)]
    else:  # lines end at line feeds only: JSON text may hold Unicode's other separators
        numbered = ((f"{name} line {number}", line) for number, line in enumerate(data.split(b"\n"), 1))
        parsed = [(place, parse_json(line, place)) for place, line in numbered if line.strip()]
    rows = []
    for place, row in parsed:
        if not isinstance(row, dict):
            raise UsageError(f"{place} is not an object: a row has named columns")
        rows.append(row)
    return rows


def read_archive(path: Path, members: Sequence[str]) -> list[Row]:
    """Return the rows of the first of `members` (JSON Lines) that the zip archive `path` has.

    Raises:
        UsageError: it has none of them, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in members:
                if member in archive.namelist():
                    if archive.getinfo(member).file_size > MOST_DATA:
                        raise ValueError(f"{member} is too large")
                    return parse_rows(archive.read(member), f"{path}/{member}")
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:  # also: encrypted
        raise UsageError(f"{path} is no readable zip archive: fetch it again ({describe_fault(error)})") from error
    raise UsageError(f"{path} has none of {', '.join(members)}: is it the archive of another dataset?")


def _read_json(path: Path) -> list[Row]:
    return parse_rows(read_bytes(path), str(path))


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        table = pyarrow.parquet.read_table(path)
        table.validate(full=True)  # else offsets of a damaged file lead out of it
        rows: list[Row] = table.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise UsageError(f"{path} is no readable Parquet file: {describe_fault(error)}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {describe_fault(error)}") from error
    return rows


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _from_folder(dataset: Dataset, folder: Path) -> list[Row]:
    for pattern in dataset.files:
        for suffix in READERS:
            if paths := sorted(folder.glob(pattern + suffix)):
                return [row for path in paths for row in read_file(path)]
    if dataset.archive and (folder / dataset.archive).is_file():
        return read_archive(folder / dataset.archive, dataset.members)
    wanted = ", ".join(dataset.files) + (f" or {dataset.archive}" if dataset.archive else "")
    raise UsageError(f"{folder} has no {wanted} ({', '.join(READERS)}): check what was unpacked there")


def _from_hub(dataset: Dataset, repo: str, revision: str | None) -> list[Row]:
    import datasets
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))

    try:
        with suppress(RemoteEntryNotFoundError):
            if dataset.archive is not None:
                return read_archive(fetch(dataset.archive), dataset.members)
            if dataset.file is not None:
                return read_file(fetch(dataset.file))
        rows: list[Row] = datasets.load_dataset(repo, dataset.config, split=dataset.split, revision=revision).to_list()
    except Exception as error:
        # what goes wrong shows as an exception of datasets, huggingface_hub, httpx or Python itself
        if isinstance(error, KvsearchError | MemoryError):
            raise
        raise _explain(repo, dataset, error) from error
    return rows


def _explain(repo: str, dataset: Dataset, error: Exception) -> KvsearchError:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    reason = describe_fault(error)
    own_files = "fetch its files elsewhere and give their folder"
    if "scripts are no longer supported" in reason:
        return UsageError(f"dataset {repo!r} is a loading script, which datasets no longer runs: {own_files}")
    if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
        return UsageError(f"{repo!r} is no file or folder here and no dataset of the hub that can be read ({reason})")
    if isinstance(error, OSError) and constants.HF_HUB_OFFLINE:
        return UsageError(
            f"dataset {repo!r} is not downloaded: leave --offline out (and HF_HUB_OFFLINE), or {own_files} ({reason})"
        )
    if isinstance(error, OSError):
        return EnvironmentFault(f"dataset {repo!r} cannot be fetched: check the network, or {own_files} ({reason})")
    return UsageError(f"dataset {repo!r} has no readable {dataset.config!r}, split {dataset.split!r} ({reason})")
