"""InfiniteBench: tasks on texts of 100,000 tokens and more, English and Chinese (Zhang et al., arXiv 2402.13718)."""

from __future__ import annotations

from kvsearch.tasks.infinitebench.specs import INFINITEBENCH_LAVA, INFINITEBENCH_TASKS
from kvsearch.tasks.infinitebench.task import InfiniteBenchTask

__all__ = ["INFINITEBENCH_LAVA", "INFINITEBENCH_TASKS", "InfiniteBenchTask"]
