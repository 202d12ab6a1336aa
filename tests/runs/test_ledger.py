"""What is appended to a ledger is read again, and no interruption damages what was there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.runs.ledger import read_lines
from tests.runs.notes import Notes, read_again


def test_a_last_line_that_is_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Notes(path) as ledger:
        ledger.add("one")
        ledger.add("two")
    data = path.read_bytes()
    for size in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:size])
        with Notes(path) as ledger:
            assert ledger.lines == ["one"]
            ledger.add("three")
        with Notes(path) as ledger:
            assert ledger.lines == ["one", "three"]


@pytest.mark.parametrize("broken", [b"\0\0\0\n", b'{"text": fal\n', b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_last_line_that_is_nonsense_is_dropped_and_another_one_is_refused(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "l"
    with Notes(path) as ledger:
        ledger.add("one")
    good = path.read_bytes()
    path.write_bytes(good + broken)
    with Notes(path) as ledger:
        assert ledger.lines == ["one"]
    assert path.read_bytes() == good
    path.write_bytes(good + broken + good)
    with pytest.raises(UsageError, match=r"l, line 2 is damaged \(it is no JSON\): restore the file, delete this"):
        Notes(path)
    assert path.read_bytes() == good + broken + good


def test_lines_are_the_json_that_was_added(tmp_path: Path) -> None:
    """Any JSON reader reads a ledger, and a line that somebody changed is as good as one that a run has written."""
    texts = ["one", "three\n", "\u2028", ""]
    with Notes(tmp_path / "l") as ledger:
        for text in texts:
            ledger.add(text)
        assert read_again(ledger) == texts
    assert [json.loads(line) for line in (tmp_path / "l").read_bytes().splitlines()] == [{"text": t} for t in texts]
    (tmp_path / "l").write_text('{"text": "mine"}\n')
    assert list(read_lines(tmp_path / "l", Notes.parse)) == ["mine"]


@pytest.mark.parametrize(("line", "problem"), [("[]", "it is no JSON object"), ('{"txt": "x"}', "it has no text")])
def test_a_whole_line_with_other_content_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    """Also the last one: nobody was killed in the middle of a whole line."""
    (tmp_path / "l").write_text(f'{{"text": "x"}}\n{line}\n')
    with pytest.raises(UsageError, match=rf"l, line 2 is damaged \({problem}\): restore the file, delete"):
        Notes(tmp_path / "l")


def test_a_line_that_does_not_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "l"
    with Notes(path) as ledger:
        ledger.add("one")
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(EnvironmentFault) as found:
                ledger.add("two")
        words = "no space left on device, free some space, then try again: 1 notes are kept"
        assert str(found.value) == f"cannot write {path}: {words}"
        assert path.read_bytes() == before
        assert ledger.lines == ["one"]
        ledger.add("three")
    with Notes(path) as ledger:
        assert ledger.lines == ["one", "three"]
