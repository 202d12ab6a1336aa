"""What runs keep: configurations, ledgers, samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save

from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import Cost, Sample
from kvsearch.resources import resource
from kvsearch.runs.identity import RunConfig
from kvsearch.search.jobs import Job, JobOutcome
from kvsearch.search.ledger import SearchLedger

IDENTITY = {"model weights": "ab", "data": "cd", "options": '{"a": 1}'}  # of samples
SHAPES = {"cosine": (2, 1, 3, 2), "relative_error": (2, 1, 3, 2), "entropy": (1, 3)}
SUMMED = (1, 3)


def recipes(job: str) -> list[bytes]:
    """The recipes that are shipped for a job."""
    return [path.read_bytes() for path in sorted(resource(f"recipes/{job}").glob("*.yaml"))]


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
    job = Job(0, tables, (3, 5), "nll")
    points = [np.array([1.0, 0.1 + 0.2]), np.array([2**-1074, -1e308])]
    with _place() as folder:
        with SearchLedger(folder / "ledger.jsonl", run_config("evolve").identity) as ledger:
            ledger.append("stage", name="group 1", begins=True, settings={"layers": [0, 1], "sigma": 0.3})
            ledger.append("asked", stage="group 1", generation=0, points=points)
            ledger.keep(job, JobOutcome(0, "ok", np.array([[0.3, 2.0], [1 / 3, -5e-324]]), "", 1.5, 40))
            ledger.append("told", stage="group 1", generation=0, points=points[::-1], values=[0.5, 1 / 3])
            ledger.keep(Job(1, tables[:1], (3,), "nll"), JobOutcome(1, "error", None, "it broke", 0.5, 3))
            ledger.append("best", candidate=tables[1], value=1 / 3, where="group 1, generation 0")
            ledger.append("stage", name="group 1", begins=False)
        return [(folder / "ledger.jsonl").read_bytes()]


def reply(**changes: Any) -> Sample:
    """A reply to a question."""
    plain = {
        "task": "qa", "category": "c", "method": "lava@8", "protocol": "question-agnostic", "key": "0-1", "question": 2,
        "reply": 'he said "a, b"\nand left', "score": 0.25, "prompt_sha256": "ab" * 32, "truncated": True,
        "context_tokens": 100, "prompt_tokens": 120, "reply_tokens": 7, **Cost(40, 1024.5, 47, 0.125, 0.3)._asdict(),
    }  # fmt: skip
    return Sample(**{**plain, **changes})


@lru_cache
def reply_ledgers() -> list[bytes]:
    """The ledger of an evaluation."""
    with _place() as folder:
        with ReplyStore(folder / "ledger.jsonl", run_config("evaluate").identity) as ledger:
            ledger.add([("k1", reply()), ("k2", reply(key="0-2", reply="", score=1.0))])
            ledger.add([("k3", reply(task="again", method="full"))], reused=True)
            ledger.add([("k4", reply(key="0-3", question=0))])
        return [(folder / "ledger.jsonl").read_bytes()]


@lru_cache
def signal_samples() -> list[bytes]:
    """Samples of a calibration by signals that is not finished."""
    rng, count = np.random.default_rng(0), 2
    arrays: dict[str, Any] = {name: rng.uniform(size=(count, *shape)) for name, shape in SHAPES.items()}
    for name, value in {"prompt": [0, 1], "question": [0, 0], "sample_context": [0, 1]}.items():
        arrays[name] = np.array(value, np.int32)
    arrays |= {"sample_length": np.array([90, 80], np.int32), "sample_tokens": np.array([5, 6], np.int32)}
    return [save({**arrays, "attention_sum": rng.uniform(size=(*SUMMED, 7))}, IDENTITY)]


@lru_cache
def step_samples() -> list[bytes]:
    """The arrays of a step of a calibration that is not finished."""
    from kvsearch.calibration.steps import Steps

    with _place() as folder:
        arrays = {"0.0": np.arange(6).reshape(1, 6), "0.1": np.ones((2, 3), np.float32)}
        list(Steps(folder, IDENTITY).stage([arrays], iter))
        return [next(folder.glob("samples/*")).read_bytes()]
