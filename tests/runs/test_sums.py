"""Checksums of what is finished: what sha256sum reads, and nothing that a job is still writing."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.runs.identity import SUMS
from kvsearch.runs.run import finish_run, mark_unfinished, read_sums


def made(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")
    return directory


def test_files_and_folders_that_match(tmp_path: Path) -> None:
    names = ("plan.json", "plan-8.json", "choice/a/ledger.jsonl", "choice/b c.json")
    made(tmp_path, *names, "mine.txt", "choice/.kvsearch-12.tmp", f"choice/{SUMS}", "choice/odd\nname")
    finish_run(tmp_path, ("plan*.json", "choice", "nothing.json"))
    found = read_sums(tmp_path)
    assert sorted(found) == sorted(names)
    assert found["plan.json"] == hashlib.sha256(b"content of plan.json").hexdigest()
    before = (tmp_path / SUMS).read_bytes()
    finish_run(tmp_path, ("choice", "plan*.json"))
    assert (tmp_path / SUMS).read_bytes() == before


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_them(tmp_path: Path) -> None:
    made(tmp_path, "a b.json", "deep/er/x.jsonl")
    finish_run(tmp_path, ("*",))
    check = ["sha256sum", "--check", "--strict", SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=True).stdout.count(b": OK\n") == 2
    (tmp_path / "a b.json").write_text("other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_two_jobs_in_one_directory(tmp_path: Path) -> None:
    """The lines of one stay as they were while the other works, whatever became of its files."""
    made(tmp_path, "profile.safetensors", "validation.json", "validation/32/ledger.jsonl")
    finish_run(tmp_path, ("profile.safetensors",))
    finish_run(tmp_path, ("validation.json", "validation"))
    whole = read_sums(tmp_path)
    assert len(whole) == 3
    (tmp_path / "profile.safetensors").write_text("changed")
    mark_unfinished(tmp_path, ("validation.json", "validation"))
    assert read_sums(tmp_path) == {"profile.safetensors": whole["profile.safetensors"]}
    finish_run(tmp_path, ("validation.json", "validation"))
    assert read_sums(tmp_path) == whole
    mark_unfinished(tmp_path, ("profile.safetensors",))
    mark_unfinished(tmp_path, ("valid*",))
    assert not (tmp_path / SUMS).exists()
    mark_unfinished(tmp_path)


@pytest.mark.parametrize(
    "line", ["x", f"{'a' * 63}  plan.json", f"{'a' * 64} plan.json", f"{'a' * 64}  ../plan.json", f"{'a' * 64}  /etc/x",
             f"{'A' * 64}  plan.json", ""],
)  # fmt: skip
def test_lines_that_are_none(tmp_path: Path, line: str) -> None:
    (tmp_path / SUMS).write_text(f"{'b' * 64}  config.json\n{line}\n{'b' * 64}  last.json\n")
    for read in (read_sums, lambda place: finish_run(place, ("x",)), lambda place: mark_unfinished(place, ("x",))):
        with pytest.raises(UsageError, match="SHA256SUMS, line 2 is damaged: delete the file and repeat the command"):
            read(tmp_path)
    mark_unfinished(tmp_path)  # a run that begins anew reads none of it
    assert not (tmp_path / SUMS).exists()
