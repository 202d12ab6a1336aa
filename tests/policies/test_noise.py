from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies.random import uniform
from tests.policies.contract import properties

MASK = 2**64 - 1


def mixed(state: int) -> int:
    """The finaliser of SplitMix64 on Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def reference(*keys: int) -> float:
    state = 0
    for key in keys:
        state = mixed((state + 0x9E3779B97F4A7C15 + key) & MASK)
    return (state >> 40) / 2**24


def test_one_key_is_splitmix64() -> None:
    """The published generator's first output for seed 0 is e220a8397b1dcdaf."""
    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert uniform(0).item() == 0xE220A8 / 2**24


@properties
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_against_unbounded_integers(keys: list[int]) -> None:
    assert uniform(*keys).item() == reference(*keys)
    assert uniform(*map(torch.tensor, keys)).item() == reference(*keys)


def grids() -> list[Tensor]:
    """Draws along each of the keys, the others fixed or small."""
    count = torch.arange(65536)
    return [
        uniform(0, 0, 0, count),
        uniform(7, 3, count[:256, None], count[:256]),
        uniform(7, count[:256, None], 1, count[:256]),
        uniform(count[:256, None], 0, 0, count[:256]),
        uniform(0, 0, 0, count * 4096),
    ]


@pytest.mark.parametrize("grid", range(5))
def test_uniform(grid: int) -> None:
    """All numbers in [0, 1), as many as expected in each of 256 bins and in every bit."""
    numbers = grids()[grid].flatten()
    assert 0 <= float(numbers.min()) < 1e-3
    assert 1 - 1e-3 < float(numbers.max()) < 1
    counts = torch.histc(numbers, 256, 0, 1)
    statistic = float((counts - 256).square().sum() / 256)  # chi-square with 255 degrees of freedom
    assert 165 < statistic < 360  # quantiles 1e-6 and 1 - 1e-5
    bits = (numbers * 2**24).long()[:, None] >> torch.arange(24) & 1
    assert float((bits.float().mean(0) - 0.5).abs().max()) < 5 * 0.5 / 65536**0.5
