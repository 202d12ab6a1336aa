"""CriticalKV (Feng et al. 2025): half of a budget by attention, the other half by what an entry adds to the output."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, cast

from kvsearch.plan.size import round_down
from kvsearch.policies.base import AS_WINDOW, Needs, Norm, Observation, Policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tensors import Tensor
from kvsearch.policies.wrapper import Wrapper


@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """Two stages over the score S of a base policy.

    The first floor(ratio * budget) entries are taken by S, protected ones included, the others by
    score[i] = (S[i] + epsilon) * mean_g |v_i W_O[q]|.

    `base` is "snapkv", which reads `window`, `kernel`, `pooling` and `group`, or "expected_attention", its value norms
    off, which reads `future` and `covariance`. Both keep the last `protect` entries (-1: `window`). A `refresh` of 0 is
    the base's own.
    """

    name: ClassVar[str] = "criticalkv"
    source: ClassVar[str] = "CriticalKV, arXiv 2502.03805; L1 norms, ratio=0.5, epsilon=1e-4 as in kvpress"
    summary: ClassVar[str] = "half by the base policy S, half by (S + epsilon) mean_g |v W_O|"
    weakness: ClassVar[str] = "costs more than its base (+12% of a prefill); inherits what its base misses"
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    base: str = "snapkv"
    ratio: float = 0.5
    epsilon: float = 1e-4
    norm: str = "l1"
    window: int = 32
    sinks: int = 0
    kernel: int = 7
    pooling: str = "max"
    group: str = "mean"
    future: int = 512
    covariance: bool = True
    refresh: int = 0
    protect: int = AS_WINDOW

    def __post_init__(self) -> None:
        self._one_of("base", "snapkv", "expected_attention")
        self._require(0 <= self.ratio <= 1, f"ratio must be between 0 and 1, got {self.ratio}")
        self._require(0 <= self.epsilon < math.inf, f"epsilon must be finite and 0 or more, got {self.epsilon}")
        self._one_of("norm", "l1", "l2")
        super().__post_init__()

    @property
    def inner(self) -> Policy:
        """The base policy."""
        shared = {"sinks": self.sinks} | ({"refresh": self.refresh} if self.refresh else {})
        if self.base == "snapkv":
            looked_at = {"window": self.window, "protect": self.protect}
            return SnapKV(kernel=self.kernel, pooling=self.pooling, group=self.group, **looked_at, **shared)
        return ExpectedAttention(
            future=self.future, covariance=self.covariance, value_norm=False, window=self.protect, **shared
        )

    def needs(self) -> Needs:
        return dataclasses.replace(self.inner.needs(), projection=True)

    def first_stage(self, observation: Observation) -> Tensor:
        """Return the base score, [B, Hkv, T] fp32."""
        base = self.inner
        return observation.shared(("score", base), lambda: base.score(observation))

    def first_stage_budget(self, budget: int) -> int:
        """Return floor(ratio * budget)."""
        return round_down(budget * self.ratio)

    def score(self, observation: Observation) -> Tensor:
        """Return the base score times the mean norm of the projected values, [B, Hkv, T] fp32."""
        norms = observation.projected_norms(cast(Norm, self.norm)).mean(2)
        return (self.first_stage(observation).clamp(min=0.0) + self.epsilon) * norms  # -inf where nothing was pooled
