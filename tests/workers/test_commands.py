"""Commands with two Ray workers leave the same bytes as without, and a worker that is killed changes nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from kvsearch.calibration.steps import StepCache
from kvsearch.workers import ray
from tests import tiny
from tests.cli.conftest import done, invoke
from tests.cli.test_bad_input import ENVIRONMENT, refused

TWO = ("--workers", 2)
SECONDS = re.compile(rb'"[a-z_]*seconds": [0-9.e-]+|(?<=,)[0-9.]+(e-\d+)?,[0-9.]+(e-\d+)?(?=\r?\n)')


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task file of short contexts in the bundled model's language."""
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", 24, length=110, facts=3)


def left(directory: Path) -> dict[str, bytes]:
    """All files of a run but ledgers, which say when, and what sums them up; without what something took."""
    files = [
        path for path in directory.rglob("*") if path.is_file() and path.name not in ("ledger.jsonl", "SHA256SUMS")
    ]
    return {str(path.relative_to(directory)): SECONDS.sub(b"", path.read_bytes()) for path in files}


def same(tmp_path: Path, command: tuple[object, ...]) -> None:
    """Run a command alone and with workers."""
    out, _ = done(*command, "-o", tmp_path / "run")
    alone = left(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "alone")
    out_of_workers, _ = done(*command, "-o", tmp_path / "run", *TWO)
    assert left(tmp_path / "run") == alone
    assert out_of_workers == out


def pids(pool: Any) -> set[int]:
    """The processes of idle workers, which are started if need be."""
    pool._start(2)
    return {pool.ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in pool._idle}


@pytest.mark.slow
@pytest.mark.nightly
def test_calibrate(kept_workers: Any, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed as the first sample is stored, when most are still to be measured."""
    before = pids(kept_workers)
    store = StepCache.store
    killed: list[int] = []

    def kill_and_store(cache: StepCache, path: Path, arrays: Any) -> None:
        if cache.folder == tmp_path / "run" / "samples" and (tmp_path / "alone").exists() and not killed:
            killed.append(min(before))
            os.kill(min(before), signal.SIGKILL)
        store(cache, path, arrays)

    monkeypatch.setattr(StepCache, "store", kill_and_store)
    asked = ("--tasks", f"jsonl:{questions}", "--samples", 12, "--answers", "given")
    same(tmp_path, ("calibrate", "bundled", "--method", "query_bank", *asked))
    after = pids(kept_workers)
    assert killed[0] not in after
    assert len(after - before) == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("kept_workers")
def test_run(questions: Path, tmp_path: Path) -> None:
    few = ("--policies", "snapkv", "--rankings", "query_bank", "--fit", 3, "--measure", 2, "--samples", 4)
    same(tmp_path, ("run", "bundled", "--tasks", f"jsonl:{questions}", *few, "--budget", 40, "--evaluations", 4))


@pytest.mark.slow
def test_without_ray(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(ray, "import_module", missing)
    words = "Ray cannot be imported (No module named 'ray'): run `pip install kvsearch[ray]`"
    command = ("run", "bundled", "--budget", 40, "--tasks", f"jsonl:{questions}", "-o", tmp_path / "run", *TWO)
    refused(invoke, ENVIRONMENT, words, *command)
    assert not (tmp_path / "run" / "config.json").exists()
