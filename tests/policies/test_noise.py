from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.policies.random import uniform
from kvsearch.testing.policy_contract import properties

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
