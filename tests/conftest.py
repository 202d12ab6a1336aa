from __future__ import annotations

import os

from hypothesis import settings

# Tiny models are fastest on one thread, and several threads make every operation wait where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For every property test: no deadline, as how fast a machine is says nothing about the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
