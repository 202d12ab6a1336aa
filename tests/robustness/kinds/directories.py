"""What lies in the directory of a run beside its results: its lock, checksums, rows of replies, a refinement."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import write_samples
from kvsearch.runs.identity import SUMS
from kvsearch.runs.lock import LOCK, _locked_error, lock_directory, refuse_locked
from kvsearch.runs.run import finish_run, mark_unfinished, read_sums
from tests.robustness.forms import Json, Text
from tests.robustness.kinds.kind import Kind, taken, verify
from tests.robustness.kinds.runs import of_run
from tests.robustness.valid import plans, runs


def _lock(path: Path) -> None:
    with path.open("rb") as file:
        refusal = str(_locked_error(path.parent, file))
    assert "\n" not in refusal
    assert len(refusal) < 1_000
    refuse_locked(path.parent)
    with lock_directory(path.parent):
        assert path.exists()


def _sums(path: Path) -> None:
    read_sums(path.parent)
    verify(path.parent)
    with taken("the checksums that were written"):
        finish_run(path.parent, ["plan.json"])
        assert "plan.json" in read_sums(path.parent)
        mark_unfinished(path.parent)


def kinds() -> Iterator[Kind]:
    """Return these kinds."""
    yield Kind("lock", LOCK, locks, Json(), _lock)
    yield Kind("sums", SUMS, sums, Text(), _sums, summed)
    beside = {**of_run("evaluate"), "ledger.jsonl": runs.reply_ledgers()[0]}
    yield Kind("samples-csv", "samples.csv", samples, Text(), lambda path: verify(path.parent), lambda: beside)


def locks() -> list[bytes]:
    """Return the lock of a process of this machine that has died, and of one of an earlier version."""
    command = ["kvsearch", "evaluate", "bundled", "-o", "runs/a"]
    dead = {"process": 2**22 + 1, "host": socket.gethostname(), "command": command}
    return [json.dumps({**dead, "since": "2026-11-23T15:00:00+00:00"}).encode(), json.dumps(dead).encode()]


def summed() -> dict[str, bytes]:
    """Return the files that checksums are of."""
    return {"plan.json": plans.plan_files()[0], "more/notes.txt": b"text"}


def sums() -> list[bytes]:
    """Return their checksums."""
    return ["".join(f"{sha256(data).hexdigest()}  {name}\n" for name, data in sorted(summed().items())).encode()]


@lru_cache
def samples() -> list[bytes]:
    """Return the rows of the replies in the ledger of an evaluation."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.json").write_bytes(runs.run_config("evaluate").to_bytes())
        (place / "ledger.jsonl").write_bytes(runs.reply_ledgers()[0])
        with ReplyStore(place / "ledger.jsonl", runs.run_config("evaluate").identity) as store:
            write_samples(list(store.samples.values()), place / "samples.csv")
        return [(place / "samples.csv").read_bytes()]
