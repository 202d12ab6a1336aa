"""Rows of a dataset in a user's files: JSON, JSON Lines, Parquet, CSV, zip archives and saved datasets."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan.files import read_bytes
from kvsearch.plan.limits import MOST_DATA
from kvsearch.plan.parsing import parse_json

Row = dict[str, Any]
MOST_DEFLATED = 1032  # bytes that one of a zip archive stands for


def read_file(path: Path) -> list[Row]:
    """Return all rows of one file; its suffix says what it is.

    Raises:
        UsageError: another suffix, no such file, or content that is not what the suffix says.
        EnvironmentFault: the file cannot be read.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} is no file of rows: give one of {', '.join(READERS)}")
    return reader(path)


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
                    told, held = archive.getinfo(member), path.stat().st_size
                    if told.compress_size > held or told.file_size > min(MOST_DATA, MOST_DEFLATED * held):
                        raise ValueError(f"{member} is said to be larger than it can be")
                    return parse_rows(archive.read(member), f"{path}/{member}")
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:  # also: encrypted
        raise UsageError(f"{path} is no readable zip archive: fetch it again ({_short(error)})") from error
    raise UsageError(f"{path} has none of {', '.join(members)}: is it the archive of another dataset?")


def is_saved(folder: Path) -> bool:
    """Return whether `datasets` saved a dataset in this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read_saved(folder: Path, split: str) -> list[Row]:
    """Return the rows of a folder that `save_to_disk` of `datasets` wrote; of several splits, those of `split`.

    Raises:
        UsageError: there is no such split, or the folder is damaged.
    """
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise UsageError(f"{folder} has no split {split!r}, only {', '.join(found)}: save that one")
            found = found[split]
        found.data.table.validate(full=True)  # else offsets of a damaged file lead out of it
        rows: list[Row] = found.to_list()
    except UsageError:
        raise
    except Exception as error:  # a damaged folder shows as an exception of datasets, pyarrow or Python itself
        raise UsageError(f"{folder} is no readable saved dataset: {_short(error)}") from error
    return rows


def _json(path: Path) -> list[Row]:
    return parse_rows(read_bytes(path), str(path))


def _parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        table = pyarrow.parquet.read_table(path)
        table.validate(full=True)
        rows: list[Row] = table.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise UsageError(f"{path} is no readable Parquet file: {_short(error)}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {_short(error)}") from error
    return rows


def _csv(path: Path) -> list[Row]:
    """Read all cells as text."""
    import pandas as pd

    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
    except ValueError as error:  # bytes that are no text, no header, ragged rows
        raise UsageError(f"{path} is no readable CSV file: {_short(error)}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {_short(error)}") from error
    rows: list[Row] = frame.to_dict("records")
    return rows


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


READERS: dict[str, Callable[[Path], list[Row]]] = {".jsonl": _json, ".json": _json, ".parquet": _parquet, ".csv": _csv}
