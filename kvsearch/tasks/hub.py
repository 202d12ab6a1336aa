"""Public datasets: from the Hugging Face hub, or from the files a user already has."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvsearch.errors import EnvironmentFault, KvsearchError, KvsearchWarning, UsageError
from kvsearch.plan.parsing import list_problems, problems_of, short_key
from kvsearch.tasks.rows import READERS, Row, is_saved, read_archive, read_file, read_saved

Checked = TypeVar("Checked", bound=BaseModel)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 20  # columns in a message


@dataclass(frozen=True)
class Dataset:
    """Where a dataset is on the hub, and under which names its files are looked for in a user's folder.

    `files` are patterns without a suffix, the first with a match is read. Where the hub has the rows in a zip
    `archive`, `members` are the names they may have in it; where it has them in one `file`, that is fetched.
    """

    repo: str
    config: str
    split: str
    files: tuple[str, ...]
    archive: str | None = None
    members: tuple[str, ...] = ()
    file: str | None = None


def load_rows(dataset: Dataset, source: str | Path | None = None, revision: str | None = None) -> list[Row]:
    """Return the rows of `dataset` from `source`: a file, a folder, or a dataset id of the hub (by default its own).

    Raises:
        UsageError: there is no such file, folder, dataset or revision, or it does not hold this dataset.
        EnvironmentFault: the hub cannot be reached, or a file cannot be read.
    """
    source = dataset.repo if source is None else source
    if not Path(source).exists():
        if not _HUB_ID.fullmatch(str(source)):
            raise UsageError(f"there is no file or folder {source}: check the path")
        return _from_hub(dataset, str(source), revision)
    if revision is not None:
        raise UsageError(f"{source} is on this machine and has no revision {revision!r}: leave the revision out")
    path = Path(source)
    if path.is_dir():
        return _from_folder(dataset, path)
    return read_archive(path, dataset.members) if path.suffix == ".zip" and dataset.members else read_file(path)


def checked(rows: Sequence[Row], model: type[Checked], where: object) -> list[Checked]:
    """Return the rows as `model`s.

    Raises:
        UsageError: a column is missing, or rows hold something else than text, numbers or lists as `model` says.
    """
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    for number, row in enumerate(rows, 1):
        missing = ", ".join(repr(name) for name in needed if name not in row)
        if missing:
            there = ", ".join(map(short_key, [*row][:_SHOWN])) or "nothing"
            raise UsageError(f"row {number} of {where} has no column {missing} (found: {there})")
    found, problems = [], []
    for number, row in enumerate(rows, 1):
        try:
            found.append(model.model_validate(row))
        except ValidationError as error:
            problems += [f"row {number}: {problem}" for problem in problems_of(error)]
    if problems:
        raise UsageError(list_problems(problems, str(where)))
    return found


def usable(rows: Sequence[Checked], fault: Callable[[Checked], str | None], where: object) -> list[tuple[int, Checked]]:
    """Return the rows without a `fault`, with their positions; a KvsearchWarning counts the others by what is wrong.

    Raises:
        UsageError: there is none.
    """
    faults = [fault(row) for row in rows]
    counts = Counter(reason for reason in faults if reason is not None)
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    kept = [(position, row) for position, row in enumerate(rows) if faults[position] is None]
    if not kept:
        raise UsageError(f"{where} has no usable row" + (f": {listed}" if listed else ""))
    if counts:
        warnings.warn(
            f"{where}: {counts.total()} of {len(rows)} rows left out: {listed}", KvsearchWarning, stacklevel=2
        )
    return kept


def _from_folder(dataset: Dataset, folder: Path) -> list[Row]:
    if is_saved(folder):
        return read_saved(folder, dataset.split)
    for pattern in dataset.files:
        for suffix in READERS:
            if found := sorted(folder.glob(pattern + suffix)):
                return [row for path in found for row in read_file(path)]
        if is_saved(folder / pattern):
            return read_saved(folder / pattern, dataset.split)
    if dataset.archive and (folder / dataset.archive).is_file():
        return read_archive(folder / dataset.archive, dataset.members)
    wanted = ", ".join(dataset.files) + (f" or {dataset.archive}" if dataset.archive else "")
    raise UsageError(f"{folder} has no {wanted} ({', '.join(READERS)}): check what was unpacked there")


def _from_hub(dataset: Dataset, repo: str, revision: str | None) -> list[Row]:
    import datasets
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        if dataset.archive is not None:
            with suppress(RemoteEntryNotFoundError):
                archive = hf_hub_download(repo, dataset.archive, repo_type="dataset", revision=revision)
                return read_archive(Path(archive), dataset.members)
        if dataset.file is not None:
            with suppress(RemoteEntryNotFoundError):
                return read_file(Path(hf_hub_download(repo, dataset.file, repo_type="dataset", revision=revision)))
        rows: list[Row] = datasets.load_dataset(repo, dataset.config, split=dataset.split, revision=revision).to_list()
    except Exception as error:
        # what goes wrong shows as an exception of datasets, huggingface_hub, httpx or Python itself
        if isinstance(error, KvsearchError | MemoryError):
            raise
        raise _explain(repo, dataset, error) from error
    return rows


def _explain(repo: str, dataset: Dataset, error: Exception) -> KvsearchError:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    reason = " ".join(str(error).split())[:300]
    own_files = "fetch its files elsewhere and give their folder"
    if "scripts are no longer supported" in reason:
        return UsageError(f"dataset {repo!r} is a loading script, which datasets no longer runs: {own_files}")
    if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
        return UsageError(f"{repo!r} is no file or folder here and no dataset of the hub that can be read ({reason})")
    if isinstance(error, OSError):
        return EnvironmentFault(
            f"dataset {repo!r} cannot be fetched: check the network and HF_HUB_OFFLINE, or {own_files} ({reason})"
        )
    return UsageError(f"dataset {repo!r} has no readable {dataset.config!r}, split {dataset.split!r} ({reason})")
