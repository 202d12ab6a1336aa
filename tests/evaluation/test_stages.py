"""Stages of a command: what is gone on with and what begins anew, and where replies cannot be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.reply_store import open_stage
from kvsearch.runs.identity import CONFIG, LEDGER, RunConfig

ONE = RunConfig(job="select", content={"seed": 1})
OTHER = RunConfig(job="select", content={"seed": 2})
NONSENSE = "nonsense\n{}\n"


def there(place: Path, config: RunConfig, ledger: str | None = "") -> Path:
    place.mkdir()
    (place / CONFIG).write_bytes(config.to_bytes())
    (place / "mine.txt").write_text("mine")
    if ledger is not None:
        (place / LEDGER).write_text(ledger)
    return place


def test_force_throws_away_only_what_cannot_be_gone_on_with(tmp_path: Path) -> None:
    line = '{"samples": []}\n'
    same = there(tmp_path / "same", ONE, line)
    other = there(tmp_path / "other", OTHER, line)
    damaged = there(tmp_path / "damaged", ONE, NONSENSE)
    early = there(tmp_path / "early", ONE, None)  # interrupted before the first reply
    for place, lines in ((same, 1), (other, 0), (damaged, 0), (early, 0), (tmp_path / "new", 0)):
        with open_stage(place, ONE, force=True) as store:
            assert store.count == lines
        assert (place / CONFIG).read_bytes() == ONE.to_bytes()
    assert (other / "mine.txt").exists()


def test_without_force_nothing_is_thrown_away(tmp_path: Path) -> None:
    other, damaged = there(tmp_path / "other", OTHER), there(tmp_path / "damaged", ONE, NONSENSE)
    for place, words in (
        (other, "other holds another run: seed is 2 there, 1 here; repeat its command to go on with it, "),
        (damaged, "line 1 is damaged"),
    ):
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        with pytest.raises(UsageError, match=words), open_stage(place, ONE):
            pass
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
