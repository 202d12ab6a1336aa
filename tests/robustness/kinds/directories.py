"""What lies in the directory of a run beside its results: its lock, checksums, rows of replies, a refinement."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvsearch.runs.lock import LOCK
from kvsearch.runs.sums import SUMS
from tests.robustness.forms import Json, Text
from tests.robustness.kinds.kind import Kind, taken, verify
from tests.robustness.kinds.runs import of_run
from tests.robustness.valid import directories as valid
from tests.robustness.valid import runs, stored


def _lock(path: Path) -> None:
    from kvsearch.runs.holder import read_holder
    from kvsearch.runs.lock import locked, refuse_locked

    with path.open("rb") as file:
        holder = read_holder(file)
    assert "\n" not in holder.words
    assert len(holder.words) < 1_000
    refuse_locked(path.parent)
    with locked(path.parent):
        assert path.exists()


def _sums(path: Path) -> None:
    from kvsearch.runs.sums import finish, read_sums, unfinish

    read_sums(path.parent)
    verify(path.parent)
    with taken("the checksums that were written"):
        finish(path.parent, ["plan.json"])
        assert "plan.json" in read_sums(path.parent)
        unfinish(path.parent)


@cache
def _search() -> Any:
    """A refinement of the bundled model at 40 entries per kv head, as far as what it has found is about it."""
    from kvsearch.models.loading import load
    from kvsearch.policies import create_policy
    from kvsearch.search.start_plans import Base

    base = Base.choosing(load("bundled"), [create_policy(name, {}) for name in ("keydiff", "tova", "knorm")])
    return SimpleNamespace(
        budget=40, base=base, as_json=dict, record=lambda searched: None,
        plan=lambda table, settings, record: base.plan(table, settings, 0, None, record),
    )  # fmt: skip


def _found(path: Path) -> None:
    from kvsearch.jobs.refine import read_found, refined

    read_found(path, [_search()])
    with taken("the plans"):
        plans = refined(path.parent, [_search()]).plans[40]
        assert all(plan.total > 0 for plan in plans.values())


def kinds() -> Iterator[Kind]:
    """Return these kinds."""
    yield Kind("lock", LOCK, valid.locks, Json(), _lock)
    yield Kind("sums", SUMS, valid.sums, Text(), _sums, valid.summed)
    yield Kind("found", "found.json", partial(stored, "found.json"), Json(), _found)
    beside = {**of_run("evaluate"), "ledger.jsonl": runs.reply_ledgers()[0]}
    yield Kind("samples-csv", "samples.csv", valid.samples, Text(), lambda path: verify(path.parent), lambda: beside)
