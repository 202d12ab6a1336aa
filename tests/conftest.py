from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

# Tiny models are fastest on one thread, and several threads make every operation wait where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns that its default will change

import pytest
import torch

# Without a GPU kernels run in Triton's interpreter, which must be known when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import examples  # noqa: F401 - the profiles of all property tests


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny random llama with the bundled tokenizer, a `LoadedModel`; a file may have one of its own."""
    from tests import tiny

    return tiny.loaded()


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The bundled model, a `LoadedModel`."""
    from kvsearch.models.loading import load

    return load("bundled")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct in float32, a `LoadedModel`, where it was fetched; it takes half a minute to load."""
    from kvsearch.models.loading import LoadOptions, load
    from kvsearch.models.real import REAL_MODELS

    real = REAL_MODELS["smollm2"]
    if not real.is_here:
        pytest.skip(f"{real.name} is not here: {real.advice}")
    return load(real.name, LoadOptions(dtype="float32"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what needs Ray, in one process, so that Ray is started once; shares begin with what takes minutes."""
    items.sort(key=_turn)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    for number, is_long in enumerate((_is_of_gpu_or_real, _is_of_examples), 1):
        long = [item for item in items if is_long(item)]
        others = [item for item in items if item not in long]
        begin = number * len(items) // workers + workers  # of the share of another worker, or shortly after it
        items[:] = [*others[:begin], *long, *others[begin:]]


def _is_of_gpu_or_real(item: pytest.Item) -> bool:
    """Whether it is of the page about GPUs, or runs on the real model, which one process should load for all."""
    return item.nodeid.startswith("tests/docs/test_gpu.py") or "smollm2" in getattr(item, "fixturenames", ())


def _is_of_examples(item: pytest.Item) -> bool:
    return item.nodeid.startswith("tests/docs/test_examples.py")


def _turn(item: pytest.Item) -> int:
    if "ray" in getattr(item, "fixturenames", ()):
        return 0
    return 1 if item.name == "test_on_device" else 2


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """One cluster for all tests; executors use it and leave it running."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from kvsearch.workers.ray import connect, import_ray  # which keeps it silent: it must be the first

    found = import_ray()
    connect(found, None)
    yield found
    found.shutdown()


@pytest.fixture(scope="session")
def ray_pool(ray: Any) -> Iterator[Any]:
    """Two workers for all tests, which import all they need once."""
    from kvsearch.workers.ray import RayPool

    with RayPool(2, cpus=0.1, start_timeout=36_000) as pool:
        yield pool


@pytest.fixture
def kept_workers(ray_pool: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Whoever asks for workers gets these two, and leaves them running."""
    from kvsearch.workers import models

    with monkeypatch.context() as patch:
        patch.setattr(models, "RayPool", lambda *_, **__: ray_pool)
        patch.setattr(ray_pool, "close", lambda: None)
        yield ray_pool


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections: code that runs out of memory asks for many of them."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what is left be freed at exit: modules of C++ name what is not."""
    gc.unfreeze()


@pytest.fixture
def idle_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verbs check their options, and do nothing."""
    from kvsearch.cli.command import MAIN_VERBS, PLAN_VERBS

    for verbs in (MAIN_VERBS, PLAN_VERBS):
        for name, verb in verbs.items():
            idle = replace(verb, action=lambda *_: None, forecast="", dry_run=bool(verb.dry_run or verb.forecast))
            monkeypatch.setitem(verbs, name, idle)
