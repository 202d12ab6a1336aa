"""Locks, checksums and rows of replies."""

from __future__ import annotations

import json
import socket
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import write_samples
from tests.robustness.valid import plans, runs


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
