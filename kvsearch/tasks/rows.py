"""Rows of public datasets: from the Hugging Face hub, or from the files a user already has."""

from __future__ import annotations

import ast
import csv
import json
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
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ValidationError

from kvsearch.core.errors import EnvironmentFault, KvsearchError, KvsearchWarning, UsageError
from kvsearch.core.files import PARQUET, decode_text, is_of_form, read_unpacked
from kvsearch.core.limits import MOST_DATA
from kvsearch.core.parsing import describe_fault, list_problems, list_validation_problems, parse_json, shorten_key

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

    def with_name(self, name: str) -> Dataset:
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
    is_archive = dataset.members and (path.suffix == ".zip" or zipfile.is_zipfile(path))
    return read_archive(path, dataset.members) if is_archive else read_file(path)


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
            columns = ", ".join(map(shorten_key, [*row][:_SHOWN])) or "nothing"
            raise UsageError(f"row {number} of {where} has no column {missing} (found: {columns})")
        try:
            checked.append(model.model_validate(row))
        except ValidationError as error:
            problems += [f"row {number}: {problem}" for problem in list_validation_problems(error)]
    if problems:
        raise UsageError(list_problems(problems, str(where)))
    return checked


def keep_usable_rows(
    rows: Sequence[Checked], fault: Callable[[Checked], str | None], where: object
) -> list[tuple[int, Checked]]:
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


# --- one reader of rows, by what is in a file -------------------------------------------------------------------------

ROW_FORMATS: Final = "JSON Lines (an object per line), a JSON array of objects, CSV with a header, or Parquet"
SUFFIXES: Final = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz", ".csv", ".tsv")  # looked for in a folder
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SUFFIXES = (".csv", ".tsv")
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
_LINE_END = re.compile("\r\n|\r|\n")  # JSON text may hold Unicode's other separators
_COLUMN = re.compile(r"[\w .:/-]{0,40}")  # a name in the header of a table; prose has longer ones, and other signs
_LONGEST_HEADER = 4000
_OF_PANDAS = "__index_level_"  # begins the columns in which it keeps an index
Located = tuple[str, Row | UsageError]  # a row, or why it is none, and its place: "line 3" or "row 3"


class CellText(str):
    """The text of a cell of CSV, in which a list is written as text, too."""

    @property
    def items(self) -> list[str]:
        """What it lists, as JSON or Python does, else itself; ValueError if it begins as a list and is none."""
        text = self.strip()
        if not text.startswith("["):
            return [str(self)]
        listed: object = None
        with suppress(ValueError, RecursionError):
            listed = json.loads(text)
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            # NumPy writes no commas, and Python joins the texts of such a list: it is not written back as it was
            listed = read if listed is None and text == str(read := ast.literal_eval(text)) else listed
        if not isinstance(listed, list):
            raise ValueError('begins with [ and is no list: write it as JSON, ["one", "two"]')
        return listed


def read_file(path: str | Path) -> list[Row]:
    """Return all rows of one file.

    Raises:
        UsageError: as `read_located`, or a row is none; the message names the first.
        EnvironmentFault: the file cannot be read.
    """
    return _require_good_rows(read_located(path), str(path))


def read_located(path: str | Path) -> list[Located]:
    """Return the rows of one file with their places; its content, unpacked, shows their format: see `ROW_FORMATS`.

    Raises:
        UsageError: there is no such file, or nothing in it is a row.
        EnvironmentFault: the file cannot be read.
    """
    data = read_unpacked(path)
    if is_of_form(data, PARQUET):
        return _number_rows(_read_parquet(data, str(path)))
    return parse_rows(decode_text(data, str(path)), str(path))


def read_rows_or_text(path: str | Path) -> list[Row] | str:
    """Read a file as rows with texts, or as one plain text; errors as `read_file`."""
    data = read_unpacked(path)
    if is_of_form(data, PARQUET):
        return _read_parquet(data, str(path))
    text = decode_text(data, str(path))
    return text if is_plain(text, str(path)) else _require_good_rows(parse_rows(text, str(path)), str(path))


def is_plain(text: str, name: str) -> bool:
    """Tell whether the text of a file is prose or the like, and neither JSON nor a table of CSV with texts.

    A name of JSON or CSV says what a file is meant to be, whatever is wrong in it. Under any other name it is JSON if
    it, or its first line, is read as that, with objects, and a table if a column is "text" and all rows have as many
    cells, two or more.
    """
    if _is_named(name, _JSON_SUFFIXES + _TABLE_SUFFIXES) or _is_json(text):
        return False
    header = _read_header(text, name)
    if header is not None and "text" in header[0]:
        with suppress(UsageError):
            return not _read_cells(text, *header, name)
    return True


def parse_rows(text: str, name: str) -> list[Located]:
    """Parse JSON Lines, a JSON array or object, or CSV into rows, each with its place in the file.

    A table of one column, or with unusual names of columns, is known by the `name` of its file: .csv or .tsv.

    Raises:
        UsageError: nothing in it is a row.
    """
    head = text.lstrip()[:1]
    if head == "[":
        return _number_rows(cast("list[object]", parse_json(text, name)))
    if head != "{" and (header := _read_header(text, name)) is not None:
        return _number_rows(_read_cells(text, *header, name))
    rows: list[Located] = []
    for number, line in enumerate(_LINE_END.split(text), 1):
        place = f"line {number}"
        if line.strip():
            try:
                rows.append((place, _require_object(place, parse_json(line.strip("\ufeff"), place))))
            except UsageError as error:
                rows.append((place, error))
    # not a complaint for each line of what is something else
    if len(rows) > (head == "{") and all(isinstance(row, UsageError) for _, row in rows):
        try:  # one object, over several lines
            rows = _number_rows([parse_json(text, name)])
        except UsageError:
            raise UsageError(f"{name} has no rows: {rows[0][1]}; give {ROW_FORMATS}") from None
    single = rows[0][1] if len(rows) == 1 else None
    if isinstance(single, dict) and single and all(isinstance(value, list | dict) for value in single.values()):
        keys = ", ".join(map(repr, list(single)[:3]))
        raise UsageError(  # tables, by split or by column, in place of rows
            f"{name} is one object of {keys}, each a list or an object: give the rows alone, as {ROW_FORMATS}"
        )
    return rows


def _number_rows(rows: Sequence[object]) -> list[Located]:
    return [
        (place, _require_object(place, row))
        for place, row in ((f"row {number}", row) for number, row in enumerate(rows, 1))
    ]


def _require_object(place: str, row: object) -> Row | UsageError:
    return row if isinstance(row, dict) else UsageError(f"{place} is not an object: a row has named columns")


def _require_good_rows(rows: Sequence[Located], name: str) -> list[Row]:
    """Return rows without their places; UsageError for the first that is none."""
    for _, row in rows:
        if isinstance(row, UsageError):
            raise UsageError(f"{name} {row}") from row
    return [cast("Row", row) for _, row in rows]


def _is_json(text: str) -> bool:
    """Tell whether text is JSON with objects: its first line by itself, or the whole."""
    start = text.lstrip()
    if start[:1] not in ("{", "["):
        return False
    for part in (_LINE_END.split(start, maxsplit=1)[0], start):
        with suppress(UsageError):
            content = parse_json(part, "")
            return isinstance(content[0] if isinstance(content, list) and content else content, dict)
    return False


def _is_named(name: str, suffixes: tuple[str, ...]) -> bool:
    """Tell whether the name of a file, compressed or not, ends with one of the suffixes, in any case."""
    name = name.lower()
    for suffix in _PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith(suffixes)


def _read_header(text: str, name: str) -> tuple[list[str], str] | None:
    """Return the columns of CSV, stripped, and the sign between them; None if text does not begin as a table does.

    Raises:
        UsageError: the file has the name of a table, and columns that cannot be told apart.
    """
    line = _LINE_END.split(text.lstrip("\r\n"), maxsplit=1)[0]
    if len(line) > _LONGEST_HEADER:
        return None
    sign = max(",;\t" if _is_named(name, (".csv",)) else "\t;,", key=line.count)  # the first where there is none
    columns = [column.strip() for column in next(csv.reader([line], delimiter=sign), [])]
    names = [column for column in columns if column]  # that of an index that pandas has written has no name
    is_unique = len({*names}) == len(names)
    if _is_named(name, _TABLE_SUFFIXES) and names:
        if not is_unique:
            raise UsageError(f"{name} has a column twice in its header, line 1: give every column a name of its own")
        return columns, sign
    return (columns, sign) if is_unique and len(names) > 1 and all(map(_COLUMN.fullmatch, names)) else None


def _read_cells(text: str, columns: Sequence[str], sign: str, name: str) -> list[Row]:
    """Return the rows of CSV with text in every cell, None where it is blank; UsageError if one has other columns."""
    import pyarrow.csv  # type: ignore[import-untyped]

    data = text.lstrip("\r\n").encode()
    names = [column or str(number) for number, column in enumerate(columns)]
    try:
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(data),
            pyarrow.csv.ReadOptions(column_names=names, skip_rows=1, block_size=min(len(data) + 1, 2**31 - 1)),
            pyarrow.csv.ParseOptions(delimiter=sign, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string())),
        )
        rows = table.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise UsageError(f"{name} begins as CSV does, and is none: {describe_fault(error)}") from error
    kept = [column for column in columns if column]
    return [{key: CellText(row[key]) if row[key].strip() else None for key in kept} for row in rows]


def _read_parquet(data: bytes, name: str) -> list[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
        table.validate(full=True)  # else offsets of a damaged file lead out of it
        table = table.select([column for column in table.column_names if not column.startswith(_OF_PANDAS)])
        rows: list[Row] = table.to_pylist()
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise UsageError(f"{name} is no readable Parquet file: {describe_fault(error)}") from error
    return rows


# --- archives, folders, the hub ---------------------------------------------------------------------------------------


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
                    place = f"{path}/{member}"
                    return _require_good_rows(parse_rows(decode_text(archive.read(member), place), place), place)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:  # also: encrypted
        raise UsageError(f"{path} is no readable zip archive: fetch it again ({describe_fault(error)})") from error
    raise UsageError(f"{path} has none of {', '.join(members)}: is it the archive of another dataset?")


def _from_folder(dataset: Dataset, folder: Path) -> list[Row]:
    for pattern in dataset.files:
        for suffix in SUFFIXES:
            if paths := sorted(folder.glob(pattern + suffix)):
                return [row for path in paths for row in read_file(path)]
    if dataset.archive and (folder / dataset.archive).is_file():
        return read_archive(folder / dataset.archive, dataset.members)
    wanted = ", ".join(dataset.files) + (f" or {dataset.archive}" if dataset.archive else "")
    raise UsageError(f"{folder} has no {wanted} ({', '.join(SUFFIXES)}): check what was unpacked there")


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
