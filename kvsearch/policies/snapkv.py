"""SnapKV (Li et al. 2024): what the last window of queries attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import AS_WINDOW, Needs, Observation, Policy
from kvsearch.policies.scoring import average_window_attention, pool_positions
from kvsearch.policies.tensors import Tensor


@dataclass(frozen=True)
class SnapKV(Policy):
    """score[i] = pool_i( agg_g (1/w) sum_{t in last w} a[t, i] ) over the candidates i < n - p.

    w = `window` queries are looked at, and the last p = `protect` entries stay (-1: as many); an entry gets nothing
    from a query before it. Protected columns are cut before pooling, the group is aggregated before pooling.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469; LongBench settings w=32, k=7, max"
    summary: ClassVar[str] = "pool(mean_g mean_t a[t, i]), t in the last w"
    weakness: ClassVar[str] = "question-agnostic prompts: 32.9 at 10% kept; budgets near the window, which counts"
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    group: str = "mean"
    sinks: int = 0
    refresh: int = 0  # decode steps between two scorings; 0: half the window
    protect: int = AS_WINDOW

    def __post_init__(self) -> None:
        self._at_least(1, "window")
        super().__post_init__()
        self._require(self.kernel >= 1 and self.kernel % 2 == 1, f"kernel must be odd, got {self.kernel}")
        self._one_of("pooling", "max", "avg", "none")
        self._one_of("group", "mean", "max")

    def needs(self) -> Needs:
        return Needs(query_rows=self.window)

    def score(self, observation: Observation) -> Tensor:
        """Return the pooled mean attention of the window, [B, Hkv, T] fp32."""
        attention = average_window_attention(observation, self.window, self.group)
        return pool_positions(attention, self.kernel, self.pooling, observation.candidates(0, self.protect))
