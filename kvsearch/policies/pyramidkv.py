"""PyramidKV (Cai et al. 2024) as a pattern: SnapKV with a short window. Its pyramid of budgets is an allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """score[i] = maxpool_i( mean_g (1/w) sum_{t in last w} a[t, i] ) over the candidates i < n - p, with w = 8."""

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069; settings of its scripts, w=8, k=7, max"
    summary: ClassVar[str] = "as `snapkv` with w = 8; the pyramid itself is `plan pyramid`"
    weakness: ClassVar[str] = "as `snapkv`"

    window: int = 8
