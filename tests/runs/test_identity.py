"""What a run is known by, and lines that are sealed with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.runs.identity import CONFIG, RunConfig, find_difference, read_config
from kvsearch.runs.ledger import parse_lines, read_lines
from tests.runs.notes import Notes
from tests.runs.sealing import reseal, sealed

CONTENT: dict[str, Any] = {"settings": {"seed": 0, "layers": (0, 1)}, "rows": "a" * 64}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{"job": "evaluate", "content": CONTENT, **changes})


def test_only_the_content_is_compared() -> None:
    one = config(command=["kvsearch"], options={"a": 1}, execution={"limits": 3})
    other = config(command=["kvsearch", "evaluate"], options={"a": 2}, execution={"limits": 4})
    assert one.difference(other) is None
    changed = config(content={**CONTENT, "settings": {"seed": 1, "layers": [0, 1]}})
    assert config().difference(changed) == "settings.seed is 1 there, 0 here"


@pytest.mark.parametrize("content", [None, "[]", "{}", '{"schema": "kvsearch.evaluation.config/1", "seed": 1}'])
def test_what_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / CONFIG).write_text(content)
    assert read_config(tmp_path) is None


def test_the_first_item_that_differs_is_shown() -> None:
    """Never two values that look the same because they are cut."""
    many = [{"name": name, "params": {"window": 32}} for name in ("snapkv", "tova", "h2o")]
    other = [*many[:2], {"name": "h2o", "params": {"window": 8}}]
    assert find_difference({"patterns": many}, {"patterns": other}) == "patterns.2.params.window is 32 there, 8 here"
    assert find_difference({"a": [64]}, {"a": [64, 128]}) == "a is [64] there, [64, 128] here"


TEXTS = ["one", 'two, "checksum": "x"}', "three\n", "\u2028", ""]
LEDGER = sealed([json.dumps({"text": text}) for text in TEXTS], "run").encode()
LINES = LEDGER.splitlines(keepends=True)


def read(data: bytes, identity: str = "run") -> list[str]:
    return [line for line, _ in parse_lines(data, Path("l"), Notes.parse, identity)]


def test_the_last_fields_of_a_line_are_its_number_and_checksum() -> None:
    for number, line in enumerate(LINES, 1):
        found = json.loads(line)
        assert list(found)[-2:] == ["line", "checksum"]
        assert found["line"] == number
        body = line[: line.rindex(b', "checksum"')]
        assert found["checksum"] == hashlib.sha256(b"run" + body).hexdigest()[:16]
    assert read(LEDGER) == TEXTS


def spliced(data: bytes, at: int, size: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + size :]


@given(st.integers(0, len(LEDGER)), st.integers(0, 300), st.one_of(st.binary(max_size=3), st.sampled_from(LINES)))
def test_no_change_of_bytes_is_taken_for_what_was_written(at: int, size: int, new: bytes) -> None:
    data = spliced(LEDGER, at, size, new)
    try:
        found = read(data)
    except UsageError:
        return
    assert found == TEXTS[: len(found)]
    assert len(found) >= LEDGER[:at].count(b"\n") - 1  # a line that is torn by the change, or joined to the one before


def test_lines_by_hand(tmp_path: Path) -> None:
    """A file that somebody has changed and sealed again is as good as one that a run has written."""
    config = RunConfig(job="evolve", content={"seed": 1})
    (tmp_path / CONFIG).write_bytes(config.to_bytes())
    path = tmp_path / "l"
    with Notes(path, config.identity) as ledger:
        for text in TEXTS:
            ledger.add(text)
    before = path.read_text()
    assert list(read_lines(path, Notes.parse)) == TEXTS
    reseal(path)
    assert path.read_text() == before
    path.write_text(before.replace("three", "other"))
    for opened in (lambda: list(read_lines(path, Notes.parse)), lambda: Notes(path, config.identity)):
        with pytest.raises(UsageError, match="line 3 is damaged"):
            opened()
    reseal(path)
    with Notes(path, config.identity) as ledger:
        assert ledger.lines[2] == "other\n"
    (tmp_path / CONFIG).write_bytes(RunConfig(job="evolve", content={"seed": 1.0}).to_bytes())
    with pytest.raises(UsageError, match="line 1 is damaged"):
        list(read_lines(path, Notes.parse))


def test_one_identity_is_no_difference() -> None:
    """Runs that go on with each other begin their ledgers alike, and no others."""
    values = [1, 1.0, True, [1], [1.0], [[1]], None, 0.0, -0.0, "1"]
    runs = [RunConfig(job="evolve", content=content) for content in ({}, *({"a": value} for value in values))]
    for one in runs:
        for other in runs:
            assert (one.difference(other) is None) == (one.identity == other.identity)
    assert runs[0].identity != RunConfig(job="select", content={}).identity
    assert runs[0].identity == RunConfig(job="evolve", content={}, execution={"workers": 2}).identity
