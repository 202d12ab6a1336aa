"""Random numbers that are a function of what they are for, and a control that evicts at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation, Policy
from kvsearch.policies.tensors import Tensor, torch

GOLDEN_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class RandomEviction(Policy):
    """Keeps random entries besides the sinks: what a method has to beat. It is no entry of the registry."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "control"

    seed: int = 0
    sinks: int = 4
    window: int = 0

    def score(self, observation: Observation) -> Tensor:
        """Return uniform noise that depends on the seed and the shape only, [B, Hkv, T] fp32."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(observation.keys.shape[:3], generator=generator).to(observation.keys.device)


def uniform(*keys: int | Tensor) -> Tensor:
    """Draw uniform numbers in [0, 1), fp32 multiples of 2^-24, one for every element of the int64 `keys`, broadcast.

    They are the same in any order, batch and device.
    """
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:  # mixed by the finaliser of SplitMix64 (Steele et al. 2014); products wrap around
        state = state + GOLDEN_INCREMENT + torch.as_tensor(key, dtype=torch.int64)
        state = (state ^ _shifted(state, 30)) * FIRST_FACTOR
        state = (state ^ _shifted(state, 27)) * SECOND
        state = state ^ _shifted(state, 31)
    return _shifted(state, 40).float() * 2.0**-24


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift to the right, logically: the sign bit is a bit like the others."""
    shifted: Tensor = (state >> bits) & (2 ** (64 - bits) - 1)
    return shifted
