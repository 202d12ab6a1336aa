"""Random numbers that are a function of what they are for: the same in any order, batch and device."""

from __future__ import annotations

from kvsearch.policies.tensors import Tensor, torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def uniform(*keys: int | Tensor) -> Tensor:
    """Draw uniform numbers in [0, 1), fp32 multiples of 2^-24, one for every element of the int64 `keys`, broadcast."""
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        state = _mixed(state + GOLDEN + torch.as_tensor(key, dtype=torch.int64))
    return _shifted(state, 40).float() * 2.0**-24


def _mixed(state: Tensor) -> Tensor:
    """Mix bits by the finaliser of SplitMix64 (Steele et al. 2014); products wrap around."""
    state = (state ^ _shifted(state, 30)) * FIRST
    state = (state ^ _shifted(state, 27)) * SECOND
    mixed: Tensor = state ^ _shifted(state, 31)
    return mixed


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift to the right, logically: the sign bit is a bit like the others."""
    shifted: Tensor = (state >> bits) & (2 ** (64 - bits) - 1)
    return shifted
