"""A control that evicts at random: what a method has to beat. It is no entry of the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation, Policy
from kvsearch.policies.tensors import Tensor, torch


@dataclass(frozen=True)
class RandomEviction(Policy):
    """Keeps random entries besides the sinks."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "control"

    seed: int = 0
    sinks: int = 4
    window: int = 0

    def score(self, observation: Observation) -> Tensor:
        """Return uniform noise that depends on the seed and the shape only, [B, Hkv, T] fp32."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(observation.keys.shape[:3], generator=generator).to(observation.keys.device)
