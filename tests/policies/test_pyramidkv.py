from __future__ import annotations

import pytest
import torch

from kvsearch.policies.pyramidkv import PyramidKV
from kvsearch.policies.snapkv import SnapKV
from tests.policies.contract import Case, observe


def test_it_is_snapkv_with_a_window_of_eight() -> None:
    assert PyramidKV().parameters() == {**SnapKV().parameters(), "window": 8}
    observation = observe(PyramidKV(), Case(heads=2, group=2, length=40, pads=(0, 3), seed=2))
    assert torch.equal(PyramidKV().score(observation), SnapKV(window=8, kernel=7, pooling="max").score(observation))
    assert not torch.equal(PyramidKV().score(observation), SnapKV(window=4).score(observation))


@pytest.mark.parametrize(
    ("policy", "interval"), [(PyramidKV(), 4), (PyramidKV(window=1), 1), (PyramidKV(refresh=9), 9)]
)
def test_it_is_scored_anew_every_half_window(policy: PyramidKV, interval: int) -> None:
    assert (policy.online, policy.refresh_interval) == (False, interval)
