"""What runs keep: configurations, ledgers, samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvsearch.calibration.steps import StepCache
from kvsearch.core.resources import find_resource
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import Sample
from kvsearch.runs.identity import RunConfig
from kvsearch.search.trials import Candidate, JobOutcome, TrialLog, candidate_key

IDENTITY = "ab"  # of samples


def recipes(job: str) -> list[bytes]:
    """The recipes that are shipped for a job."""
    return [path.read_bytes() for path in sorted(find_resource(f"recipes/{job}").glob("*.yaml"))]


@contextmanager
def _place() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


def run_config(job: str) -> RunConfig:
    """The configuration beside a ledger."""
    return RunConfig(job=job, command=["kvsearch"], options={"model": "m"}, content={"job": job})  # type: ignore[arg-type]


@lru_cache
def search_ledgers() -> list[bytes]:
    """The ledger of a search, with a line of every kind."""
    tables = np.array([[8, 4], [6, 6]]), np.array([[6, 6], [7, 5]])
    keys = [candidate_key(table, "nll") for table in tables]
    points = [np.array([1.0, 0.1 + 0.2]), np.array([2**-1074, -1e308])]
    with _place() as folder:
        with TrialLog(folder / "ledger.jsonl", run_config("evolve").identity) as ledger:
            ledger.begin("group 1")
            ledger.record(keys, JobOutcome("ok", np.array([[0.3, 2.0], [1 / 3, -5e-324]]), "", 1.5, 40))
            ledger.tell("group 1", 0, points, [0.5, 1 / 3])
            ledger.record(keys[:1], JobOutcome("error", None, "it broke", 0.5, 3))
            ledger.record_best(Candidate(tables[1], 1 / 3, "group 1, generation 0"))
        return [(folder / "ledger.jsonl").read_bytes()]


def reply(**changes: Any) -> Sample:
    """A reply to a question."""
    plain = {
        "task": "qa", "category": "c", "method": "lava@8", "protocol": "question-agnostic", "key": "0-1", "question": 2,
        "reply": 'he said "a, b"\nand left', "score": 0.25, "prompt_sha256": "ab" * 32, "truncated": True,
        "context_tokens": 100, "prompt_tokens": 120, "reply_tokens": 7, "entries": 40, "bytes": 1024.5,
        "most": 47, "prefill_seconds": 0.125, "reply_seconds": 0.3,
    }  # fmt: skip
    return Sample(**{**plain, **changes})


@lru_cache
def reply_ledgers() -> list[bytes]:
    """The ledger of an evaluation."""
    with _place() as folder:
        with ReplyStore(folder / "ledger.jsonl", run_config("evaluate").identity) as ledger:
            ledger.add([("k1", reply()), ("k2", reply(key="0-2", reply="", score=1.0))])
            ledger.add([("k3", reply(task="again", method="full"))])
            ledger.add([("k4", reply(key="0-3", question=0))])
        return [(folder / "ledger.jsonl").read_bytes()]


@lru_cache
def step_samples() -> list[bytes]:
    """The arrays of a step of a calibration that is not finished."""
    with _place() as folder:
        arrays = {"0.0": np.arange(6).reshape(1, 6), "0.1": np.ones((2, 3), np.float32)}
        list(StepCache(folder, IDENTITY).stage([arrays], iter))
        return [next(folder.glob("samples/*")).read_bytes()]
