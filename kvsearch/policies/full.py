"""FullKV: keeps every entry. A layer under it is charged its full length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation, Policy
from kvsearch.policies.tensors import Tensor


@dataclass(frozen=True)
class FullKV(Policy):
    name: ClassVar[str] = "full"
    source: ClassVar[str] = "no eviction"
    summary: ClassVar[str] = "none: everything stays"
    weakness: ClassVar[str] = "long prompts: its whole length counts in the total"

    def score(self, observation: Observation) -> Tensor:
        """Return a constant, [B, Hkv, T] fp32: nothing is preferred, the budget is the length."""
        return observation.keys.new_zeros(observation.keys.shape[:3]).float()

    def keeps_all(self, budget: int, length: int) -> bool:  # noqa: ARG002
        """Never evict, whatever the budget."""
        return True
