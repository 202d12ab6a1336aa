from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsearch.policies import Observation, QueryStatistics
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.testing.policy_contract import Case, observe, rope
from tests.policies.examples import kept


def still(positions: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(len(positions), 2), torch.zeros(len(positions), 2)


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States [..., N, 4] with the rotary embedding applied."""
    return states * cos + torch.cat((-states[..., 2:], states[..., :2]), -1) * sin


def observed(covariance: Tensor, sinks: int = 0) -> Observation:
    return Observation(
        keys=torch.tensor([[[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]]),
        values=torch.tensor([[[[3.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]]),
        valid=torch.ones(1, 3, dtype=torch.bool),
        scaling=2**-0.5,
        statistics={sinks: QueryStatistics(torch.tensor([[[1.0, 0.0]]]), covariance[None, None])},
        rotary=still,
    )


@pytest.mark.parametrize(
    ("covariance", "probability"), [((0.0, 0.0), [0.284, 0.576, 0.140]), ((0.0, 4.0), [0.229, 0.464, 0.307])]
)
def test_scores(covariance: tuple[float, float], probability: list[float]) -> None:
    observation = observed(torch.diag(torch.tensor(covariance)))
    expected = torch.tensor(probability)
    bare = ExpectedAttention(sinks=0, value_norm=False).score(observation)[0, 0]
    torch.testing.assert_close(bare, expected, atol=5e-4, rtol=0)
    scores = ExpectedAttention(sinks=0).score(observation)[0, 0]
    torch.testing.assert_close(scores, expected * torch.tensor([3.0, 1.0, 1.0]), atol=1.5e-3, rtol=0)
    assert kept(ExpectedAttention(sinks=0), observation, 1) == {0}
    shifted = ExpectedAttention(sinks=0, epsilon=0.5).score(observation)[0, 0]
    torch.testing.assert_close(shifted - scores, torch.tensor([1.5, 0.5, 0.5]))


def test_sinks_are_left_out_of_the_softmax() -> None:
    scores = ExpectedAttention(sinks=1, value_norm=False).score(observed(torch.zeros(2, 2), sinks=1))[0, 0]
    behind = torch.tensor([2.0, 0.0]).mul(2**-0.5).softmax(-1)
    torch.testing.assert_close(scores, torch.cat([torch.zeros(1), behind]))


def test_the_rotation_is_the_mean_over_the_positions_that_follow() -> None:
    """Against turning the mean query to every future position, one by one."""
    policy = ExpectedAttention(future=6, sinks=0, covariance=False, value_norm=False)
    observation = observe(policy, Case(heads=2, group=3, length=9, pads=(0, 4), seed=5))
    expected = torch.zeros(2, 2, 9)
    for row, length in enumerate((9, 5)):
        cos, sin = rope(torch.arange(length, length + 6))
        future = turned(observation.statistics[0].mean[row][:, None], cos, sin).mean(1)
        logits = torch.einsum("hgd,htd->hgt", future.view(2, 3, 4), observation.keys[row]) * 0.5
        logits[..., : 9 - length] = float("-inf")
        expected[row] = logits.softmax(-1).mean(1)
    torch.testing.assert_close(policy.score(observation), expected, atol=1e-6, rtol=1e-5)


def test_the_quadratic_form_is_the_variance_of_the_logit() -> None:
    policy = ExpectedAttention(future=1, sinks=0, value_norm=False)
    observation = observe(policy, Case(heads=1, group=1, length=6, pads=(0,), seed=3))
    cos, sin = rope(torch.tensor([6]))
    rotation = turned(torch.eye(4), cos, sin).T
    mean = rotation @ observation.statistics[0].mean[0, 0]
    covariance = rotation @ observation.statistics[0].covariance[0, 0] @ rotation.T
    keys = observation.keys[0, 0]
    logits = keys @ mean * 0.5 + torch.einsum("td,de,te->t", keys, covariance, keys) * 0.25 / 2
    torch.testing.assert_close(policy.score(observation)[0, 0], logits.softmax(-1), atol=1e-6, rtol=1e-4)
