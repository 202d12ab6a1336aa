"""Commands with two Ray workers leave the same bytes as without, and a worker that is killed changes nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvsearch.workers import cluster
from tests import tiny
from tests.cli.conftest import invoke
from tests.cli.test_bad_input import ENVIRONMENT, USAGE, refused

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


def same(tmp_path: Path, command: tuple[object, ...], kill: Any = None) -> None:
    """Run a command alone and with workers, of which one is killed where `kill` is the pool."""
    code, out, talk = invoke(*command, "-o", tmp_path / "run")
    assert code == 0, talk
    alone = left(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "alone")
    with killed(kill, tmp_path / "run"):
        code, out_of_workers, talk = invoke(*command, "-o", tmp_path / "run", *TWO)
    assert code == 0, talk
    assert left(tmp_path / "run") == alone
    assert out_of_workers == out


def pids(pool: Any) -> set[int]:
    """The processes of idle workers, which are started if need be."""
    actors = [pool.take() for _ in range(2)]
    found = {pool.ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in actors}
    for actor in actors:
        pool.give_back(actor)
    return found


@contextmanager
def killed(pool: Any, directory: Path) -> Iterator[None]:
    """Kill a worker once there is a sample in `directory`, and see that another one has taken its place."""
    if pool is None:
        yield
        return
    before = pids(pool)

    def kill() -> None:
        while not list(directory.rglob("samples/*.safetensors")):
            time.sleep(0.01)
        os.kill(min(before), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()
    assert len(pids(pool) - before) == 1


@pytest.mark.slow
def test_calibrate(kept_workers: Any, questions: Path, tmp_path: Path) -> None:
    asked = ("--tasks", f"jsonl:{questions}", "--samples", 12, "--answers", "given")
    same(tmp_path, ("calibrate", "bundled", "--method", "query_bank", *asked), kept_workers)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_evaluate(questions: Path, tmp_path: Path) -> None:
    methods = ("--methods", "snapkv,lava", "--budgets", 16, "--set", "window=4")
    same(tmp_path, ("evaluate", "bundled", *methods, "--tasks", f"jsonl:{questions}", "--samples", 6, "--batch", 2))


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_run(questions: Path, tmp_path: Path) -> None:
    few = ("--policies", "snapkv", "--rankings", "query_bank", "--fit", 3, "--measure", 2, "--samples", 4)
    same(tmp_path, ("run", "bundled", "--tasks", f"jsonl:{questions}", *few, "--budget", 40, "--evaluations", 4))


@pytest.mark.parametrize("verb", ["calibrate", "evaluate", "run", "headroom", "select", "validate", "reproduce"])
def test_bad_input(verb: str, tmp_path: Path) -> None:
    first = {"select": tmp_path, "validate": tmp_path, "reproduce": "lukv-models"}.get(verb, "bundled")
    output = () if verb in ("headroom", "validate") else ("-o", tmp_path / "run")
    for more, words in (
        ((*TWO[:1], 0), "--workers: Input should be greater than or equal to 1"),
        ((*TWO[:1], -3), "--workers: Input should be greater than or equal to 1"),
        (("--ray-address", "auto"), "--ray-address is for Ray workers: say how many with --workers"),
    ):
        refused(invoke, USAGE, words, verb, first, *more, *output)


@pytest.mark.parametrize("verb", ["calibrate", "evaluate", "run"])
def test_without_ray(verb: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cluster, "import_module", missing)
    words = "Ray cannot be imported (No module named 'ray'): run `pip install kvsearch[ray]`"
    size = {"evaluate": ("--methods", "snapkv", "--budgets", 40), "run": ("--budget", 40)}.get(verb, ())
    command = (verb, "bundled", *size, "--tasks", f"jsonl:{questions}", "-o", tmp_path / "run", *TWO)
    refused(invoke, ENVIRONMENT, words, *command)
    assert not (tmp_path / "run" / "config.json").exists()
