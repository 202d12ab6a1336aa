"""Rows of public datasets: files of every format, folders, and the hub's answers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.tasks.rows import Dataset, Row, load_rows

ROWS: list[Row] = [
    {"question": "Wo?", "answers": ["Köln", "b"], "length": 3},
    {"question": "2", "answers": [], "length": 4},
]
FLAT = [{"question": row["question"], "length": row["length"]} for row in ROWS]
REPO = "owner/data"
DATA = Dataset("small", "test", ("small", "data/small", "small/test", "small/test-*"))
ZIPPED = Dataset(DATA.config, DATA.split, DATA.files, "data.zip", ("data/small.jsonl", "small.jsonl"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def lines(rows: list[Row] = ROWS) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, rows: list[Row] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def archive(path: Path, member: str, content: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(member, lines() if content is None else content)
    return path


def refusal(dataset: Dataset, source: str | Path, kind: type[Exception] = UsageError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_rows(dataset, source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_files_of_every_format(tmp_path: Path) -> None:
    assert load_rows(DATA, write(tmp_path / "a.jsonl", lines())) == ROWS
    assert load_rows(DATA, write(tmp_path / "dos.JSONL", lines().replace("\n", "\r\n\r\n"))) == ROWS
    assert load_rows(DATA, write(tmp_path / "a.json", "\n " + json.dumps(ROWS))) == ROWS
    assert load_rows(DATA, write(tmp_path / "lines.json", lines())) == ROWS
    assert load_rows(DATA, parquet(tmp_path / "a.parquet")) == ROWS
    assert load_rows(ZIPPED, archive(tmp_path / "x.zip", "data/small.jsonl")) == ROWS
    assert load_rows(ZIPPED, archive(tmp_path / "y.zip", "small.jsonl")) == ROWS


def test_parts_of_a_split_are_joined_in_order(tmp_path: Path) -> None:
    parquet(tmp_path / "small" / "test-00001-of-00002.parquet", ROWS[1:])
    parquet(tmp_path / "small" / "test-00000-of-00002.parquet", ROWS[:1])
    parquet(tmp_path / "small" / "train-00000-of-00001.parquet", FLAT)
    assert load_rows(DATA, tmp_path) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.zip", b"PK", "a.zip has no rows"),
        ("a.jsonl", lines() + "[]\n", "a.jsonl line 3 is not an object: a row has named columns"),
        ("a.json", "[{}, 3]", "a.json row 2 is not an object"),
        ("a.jsonl", b"PAR1\x15 no parquet", "a.jsonl is no readable Parquet file: "),
    ],
)
def test_files_of_no_use(name: str, content: str | bytes, problem: str, tmp_path: Path) -> None:
    assert problem in refusal(DATA, write(tmp_path / name, content))


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(repo: str, config: str, *, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((repo, config, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_rows(DATA, REPO) == load_rows(DATA, "my/copy", "v2") == ROWS
    assert asked == [("owner/data", "small", "test", None), ("my/copy", "small", "test", "v2")]


def test_the_archive_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `huggingface_hub` keeps it, so that nothing needs to be fetched."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "datasets--owner--data"
    archive(kept / "snapshots" / ("a" * 40) / "data.zip", "data/small.jsonl")
    write(kept / "refs" / "main", "a" * 40)
    assert load_rows(ZIPPED, REPO) == load_rows(ZIPPED, REPO, revision="a" * 40) == ROWS
    assert "is not downloaded" in refusal(ZIPPED, REPO, revision="b" * 40)


@pytest.mark.parametrize(
    ("error", "kind", "problem"),
    [
        (
            RuntimeError("Dataset scripts are no longer supported, but found data.py"),
            UsageError,
            "dataset 'owner/data' is a loading script, which datasets no longer runs: fetch its files elsewhere",
        ),
        (
            datasets.exceptions.DatasetNotFoundError("Dataset 'owner/data' doesn't\nexist"),
            UsageError,
            "'owner/data' is no file or folder here and no dataset of the hub that can be read (Dataset 'owner/data'",
        ),
        (ConnectionError("Couldn't reach"), UsageError, "is not downloaded: leave --offline out"),
    ],
)
def test_what_the_hub_refuses(
    error: Exception, kind: type[Exception], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert problem in refusal(DATA, REPO, kind)
    if isinstance(error, ConnectionError):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        assert "cannot be fetched: check the network" in refusal(DATA, REPO, EnvironmentFault)
