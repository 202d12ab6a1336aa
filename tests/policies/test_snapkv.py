""""""

from __future__ import annotations

import pytest
import torch

from kvsearch.policies import rank_entries
from kvsearch.policies.pyramidkv import PyramidKV
from kvsearch.policies.scoring import pool_positions
from kvsearch.policies.snapkv import SnapKV
from tests.policies.contract import Case, observe
from tests.policies.examples import WINDOW_ROWS, attending, kept


@pytest.mark.parametrize(
    ("pooling", "scores", "expected"),
    [
        ("max", [0.30, 0.30, 0.20, 0.20, 0.20, 0.10], {0, 1, 2, 6, 7}),
        ("avg", [0.1067, 0.1233, 0.09, 0.0933, 0.11, 0.0433], {0, 1, 4, 6, 7}),
        ("none", [0.30, 0.02, 0.05, 0.20, 0.03, 0.10], {0, 3, 5, 6, 7}),
    ],
)
def test_pooling(pooling: str, scores: list[float], expected: set[int]) -> None:
    policy, observation = SnapKV(window=2, kernel=3, pooling=pooling), attending(WINDOW_ROWS)
    torch.testing.assert_close(policy.score(observation)[0, 0, :6], torch.tensor(scores), atol=5e-5, rtol=0)
    assert kept(policy, observation, 5) == expected


def test_plateaus_of_max_pooling_go_to_the_lower_position() -> None:
    # 0.20 three times: of 2, 3 and 4 only the lowest fits (torch.topk may return any)
    ranks = rank_entries(torch.tensor([[[0.30, 0.30, 0.20, 0.20, 0.20, 0.10]]]), torch.ones(1, 6, dtype=torch.bool))
    assert ranks.tolist() == [[[0, 1, 2, 3, 4, 5]]]


def test_the_group_is_aggregated_before_it_is_pooled() -> None:
    a, b = [0.6, 0.0, 0.1, 0.0, 0.3], [0.0, 0.1, 0.5, 0.0, 0.4]
    policy = SnapKV(window=1, kernel=3, pooling="max", group="mean")
    scores = policy.score(attending([a], [b]))[0, 0, :4]
    torch.testing.assert_close(scores, torch.tensor([0.3, 0.3, 0.3, 0.3]))


def test_average_pooling_pads_with_zero_and_max_pooling_with_nothing() -> None:
    scores, inside = torch.tensor([[[3.0, 6.0, 9.0, -1.0]]]), torch.tensor([[True, True, True, False]])
    assert pool_positions(scores, 3, "avg", inside)[0, 0, :3].tolist() == [3.0, 6.0, 5.0]
    assert pool_positions(-scores, 3, "max", inside)[0, 0, :3].tolist() == [-3.0, -3.0, -6.0]


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
