"""What lies in the directory of a run beside its results: its lock, checksums, rows of replies, a refinement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvsearch.runs.identity import SUMS
from kvsearch.runs.lock import LOCK
from tests.robustness.forms import Json, Text
from tests.robustness.kinds.kind import Kind, taken, verify
from tests.robustness.kinds.runs import of_run
from tests.robustness.valid import directories as valid
from tests.robustness.valid import runs


def _lock(path: Path) -> None:
    from kvsearch.runs.lock import _refusal, locked, refuse_locked

    with path.open("rb") as file:
        refusal = str(_refusal(path.parent, file))
    assert "\n" not in refusal
    assert len(refusal) < 1_000
    refuse_locked(path.parent)
    with locked(path.parent):
        assert path.exists()


def _sums(path: Path) -> None:
    from kvsearch.runs.run import finish, read_sums, unfinish

    read_sums(path.parent)
    verify(path.parent)
    with taken("the checksums that were written"):
        finish(path.parent, ["plan.json"])
        assert "plan.json" in read_sums(path.parent)
        unfinish(path.parent)


def kinds() -> Iterator[Kind]:
    """Return these kinds."""
    yield Kind("lock", LOCK, valid.locks, Json(), _lock)
    yield Kind("sums", SUMS, valid.sums, Text(), _sums, valid.summed)
    beside = {**of_run("evaluate"), "ledger.jsonl": runs.reply_ledgers()[0]}
    yield Kind("samples-csv", "samples.csv", valid.samples, Text(), lambda path: verify(path.parent), lambda: beside)
