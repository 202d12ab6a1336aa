from __future__ import annotations

import gc
import os

from hypothesis import settings

# Tiny models are fastest on one thread, and several threads make every operation wait where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The examples of every property test; choose with `--hypothesis-profile`. No deadline in any of them, as how fast a
# machine is says nothing about the code.
for name, examples in {"quick": 25, "default": 100, "ci": 200}.items():
    settings.register_profile(name, max_examples=examples, deadline=None)
settings.load_profile("default")


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections: code that runs out of memory asks for many of them."""
    gc.freeze()
