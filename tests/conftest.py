from __future__ import annotations

import gc
import os

# Tiny models are fastest on one thread, and several threads make every operation wait where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels run in Triton's interpreter, which must be known when it is first imported; nothing else here uses it.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns that its default will change

import pytest

from tests import examples  # noqa: F401 - the profiles of all property tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    items.sort(key=lambda item: item.name != "test_on_device")


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections: code that runs out of memory asks for many of them."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what is left be freed at exit: modules of C++ name what is not."""
    gc.unfreeze()
