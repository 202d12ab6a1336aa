"""Policies that look at a window of the last queries: SnapKV and LAVa."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.policies.lava import LAVa
from kvsearch.policies.pyramidkv import PyramidKV
from kvsearch.policies.scoring import pool_positions
from kvsearch.policies.snapkv import SnapKV
from kvsearch.testing.policy_contract import Case, observe
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


# two heads with four candidates and a window of one; the largest value norms are 1 and 3, in the window 100
ATTENTION = ([[0.40, 0.20, 0.10, 0.05, 0.25]], [[0.10, 0.10, 0.30, 0.20, 0.30]])
LARGEST = torch.tensor([[0.6, -0.4], [-1.0, 2.0]])  # one vector per head, |.|_1 = 1 and 3


def two_heads() -> Observation:
    values = torch.zeros(1, 2, 5, 2)
    values[0, :, 2] = LARGEST
    values[0, :, 0] = LARGEST / 2
    values[0, :, 4] = 50.0
    return dataclasses.replace(attending(*ATTENTION, kv_heads=2), values=values)


def scores(policy: LAVa, observation: Observation) -> Tensor:
    return policy.score(observation)[0]


def test_heads_are_comparable() -> None:
    found = scores(LAVa(window=1, kernel=1), two_heads())[:, :4]
    torch.testing.assert_close(found, torch.tensor([[0.40, 0.20, 0.10, 0.05], [0.30, 0.30, 0.90, 0.60]]))
    together = found.flatten().argsort(descending=True, stable=True)[:4]
    # the fourth place is a tie in writing; in fp32 .3 * 3 > 3 * .1 does not matter, both are head 1's
    assert sorted(index // 4 for index in together.tolist()) == [0, 1, 1, 1]
    assert {0, 6, 7} <= set(together.tolist())


def test_the_value_factor_changes_no_order_within_a_head() -> None:
    policy, observation = LAVa(window=3), observe(LAVa(window=3), Case(2, 2, 30, (0, 5), seed=4))
    alike = SnapKV(window=3, group="max")
    for budget in (5, 11, 20):
        for head in range(2):
            assert kept(policy, observation, budget, head) == kept(alike, observation, budget, head)


def test_the_largest_of_the_group_after_the_sum_over_rows() -> None:
    """Two heads look at entry 0 at different times: sums .7 and .5 over two rows, so .35."""
    first = [[0.6, 0.2, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]
    second = [[0.1, 0.4, 0.5, 0.0], [0.4, 0.2, 0.2, 0.2]]
    values = torch.ones(1, 1, 4, 1)
    observation = dataclasses.replace(attending(first, second), values=values)
    torch.testing.assert_close(scores(LAVa(window=2, kernel=1), observation)[0, :2], torch.tensor([0.35, 0.30]))
    found = scores(LAVa(window=2, kernel=1, group="mean"), observation)[0, :2]
    torch.testing.assert_close(found, torch.tensor([0.30, 0.25]))


def test_attention_is_pooled() -> None:
    found = scores(LAVa(window=1, kernel=3), two_heads())[:, :4]
    torch.testing.assert_close(found, torch.tensor([[0.40, 0.40, 0.20, 0.10], [0.30, 0.90, 0.90, 0.90]]))
    averaged = scores(LAVa(window=1, kernel=3, pooling="avg"), two_heads())[1, :4]
    torch.testing.assert_close(averaged, torch.tensor([0.2, 0.5, 0.6, 0.5]))


def test_scored_anew_it_looks_at_what_is_held() -> None:
    """Three of nine tokens are left before a window of two: each segment has its own index and count."""
    keys = torch.eye(5)[None, None].repeat(2, 1, 1, 1)
    index = torch.tensor([[0, 3, 5, 7, 8], [-1, 1, 4, 7, 8]])
    queries = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]]).log().expand(2, 1, 2, 5)
    values = torch.tensor([2.0, 5.0, 1.0, 9.0, 9.0]).view(1, 1, 5, 1).repeat(2, 1, 1, 1)
    values[1, 0, 0] = 100.0
    observation = Observation(
        keys, values, index >= 0, 1.0, queries, token_index=index, token_count=torch.tensor([9, 9])
    )
    found = LAVa(window=2, kernel=1).score(observation)[:, 0]
    whole, part = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, 0.3])
    # the row of token 7 does not see token 8
    torch.testing.assert_close(found[0, :3], 5.0 * (whole / 0.8 + whole) / 2)
    torch.testing.assert_close(found[1, 1:3], 5.0 * (part / 0.7 + part / 0.9) / 2)
