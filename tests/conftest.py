from __future__ import annotations

import gc
import os

# Tiny models are fastest on one thread, and several threads make every operation wait where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import examples  # noqa: F401 - the profiles of all property tests


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections: code that runs out of memory asks for many of them."""
    gc.freeze()
