"""LongBench: 21 datasets of six categories, English and Chinese, and LongBench-E (Bai et al., arXiv 2308.14508)."""

from __future__ import annotations

from kvsearch.tasks.longbench.specs import AVERAGES, LONGBENCH_E, LONGBENCH_ENGLISH, LONGBENCH_TASKS
from kvsearch.tasks.longbench.task import BUCKETS, LongBenchTask, by_bucket

__all__ = [
    "AVERAGES",
    "BUCKETS",
    "LONGBENCH_E",
    "LONGBENCH_ENGLISH",
    "LONGBENCH_TASKS",
    "LongBenchTask",
    "by_bucket",
]
