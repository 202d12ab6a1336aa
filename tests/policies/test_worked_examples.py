"""The numeric examples of the methods' specification, each through the whole policy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvsearch.policies import Observation, Policy, QueryStatistics, keep_mask, kept_indices, rank_entries
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.full import FullKV
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.ranking import protection_order
from kvsearch.policies.scoring import aggregate, pool_positions
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.streaming import StreamingLLM

from .contract import Case, observe, rope


def kept(policy: Policy, observation: Observation, budget: int, head: int = 0) -> set[int]:
    scores = policy.score(observation)
    ranks = rank_entries(scores, observation.valid, policy.sink_count, policy.window_count)
    return set(kept_indices(ranks, budget, head=head))


def plain(length: int) -> Observation:
    """One sequence, one head, nothing to tell its entries apart."""
    states = torch.zeros(1, 1, length, 2)
    return Observation(states, states, torch.ones(1, length, dtype=torch.bool), 1.0)


def attending(*heads: list[list[float]]) -> Observation:
    """One kv head whose query heads pay exactly the attention given, one row per window query."""
    rows = torch.tensor(heads)  # [G, rows, T]
    length = rows.shape[-1]
    logits = rows.log().clamp(min=-1e4)
    keys = torch.eye(length)[None, None]
    return Observation(keys, keys, torch.ones(1, length, dtype=torch.bool), 1.0, queries=logits[None])


class TestFullKV:
    def test_keeps_everything(self) -> None:
        assert kept(FullKV(), plain(4), 4) == {0, 1, 2, 3}


class TestStreamingLLM:
    def test_sinks_and_recent(self) -> None:
        assert kept(StreamingLLM(sinks=2), plain(8), 5) == {0, 1, 5, 6, 7}

    @pytest.mark.parametrize(("budget", "expected"), [(1, {7}), (2, {0, 7}), (4, {0, 1, 2, 7}), (5, {0, 1, 2, 6, 7})])
    def test_small_budgets_keep_the_newest_and_then_sinks(self, budget: int, expected: set[int]) -> None:
        assert kept(StreamingLLM(sinks=3), plain(8), budget) == expected

    def test_sinks_start_at_the_first_real_token(self) -> None:
        valid = torch.tensor([[False, False, False, True, True, True, True, True]])
        observation = dataclasses.replace(plain(8), valid=valid)
        assert kept(StreamingLLM(sinks=2), observation, 3) == {3, 4, 7}


# mean attention of the window over the six candidates, as two rows that see the window causally
WINDOW_ROWS = [[0.30, 0.02, 0.05, 0.20, 0.03, 0.10, 0.30, 0.00], [0.30, 0.02, 0.05, 0.20, 0.03, 0.10, 0.10, 0.20]]


class TestSnapKV:
    @pytest.mark.parametrize(
        ("pooling", "scores", "expected"),
        [
            ("max", [0.30, 0.30, 0.20, 0.20, 0.20, 0.10], {0, 1, 2, 6, 7}),
            ("avg", [0.1067, 0.1233, 0.09, 0.0933, 0.11, 0.0433], {0, 1, 4, 6, 7}),
            ("none", [0.30, 0.02, 0.05, 0.20, 0.03, 0.10], {0, 3, 5, 6, 7}),
        ],
    )
    def test_pooling(self, pooling: str, scores: list[float], expected: set[int]) -> None:
        policy, observation = SnapKV(window=2, kernel=3, pooling=pooling), attending(WINDOW_ROWS)
        torch.testing.assert_close(policy.score(observation)[0, 0, :6], torch.tensor(scores), atol=5e-5, rtol=0)
        assert kept(policy, observation, 5) == expected

    def test_plateaus_of_max_pooling_go_to_the_lower_position(self) -> None:
        # 0.20 three times: of 2, 3 and 4 only the lowest fits (torch.topk may return any)
        ranks = rank_entries(torch.tensor([[[0.30, 0.30, 0.20, 0.20, 0.20, 0.10]]]), torch.ones(1, 6, dtype=torch.bool))
        assert ranks.tolist() == [[[0, 1, 2, 3, 4, 5]]]

    def test_rows_before_the_window_do_not_count(self) -> None:
        noise = [[0.0, 0.9, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0], *WINDOW_ROWS]
        assert kept(SnapKV(window=2, kernel=1), attending(noise), 5) == {0, 3, 5, 6, 7}

    def test_the_group_is_aggregated_before_it_is_pooled(self) -> None:
        a, b = [0.6, 0.0, 0.1, 0.0, 0.3], [0.0, 0.1, 0.5, 0.0, 0.4]
        policy = SnapKV(window=1, kernel=3, pooling="max", group="mean")
        scores = policy.score(attending([a], [b]))[0, 0, :4]
        torch.testing.assert_close(scores, torch.tensor([0.3, 0.3, 0.3, 0.3]))

    @pytest.mark.parametrize(
        ("group", "pooling", "commute"), [("mean", "max", False), ("max", "max", True), ("mean", "avg", True)]
    )
    def test_which_aggregations_commute_with_pooling(self, group: str, pooling: str, commute: bool) -> None:
        attention = torch.tensor([[[0.6, 0.0, 0.1, 0.0], [0.0, 0.1, 0.5, 0.0]]])  # [1, G, T]
        everywhere = torch.ones(1, 4, dtype=torch.bool)
        first = pool_positions(aggregate(attention, group, 1)[:, None], 3, pooling, everywhere)[:, 0]
        after = aggregate(pool_positions(attention, 3, pooling, everywhere), group, 1)
        assert torch.allclose(first, after) == commute
        if not commute:
            torch.testing.assert_close(first, torch.tensor([[0.3, 0.3, 0.3, 0.3]]))
            torch.testing.assert_close(after, torch.tensor([[0.35, 0.55, 0.3, 0.3]]))

    def test_average_pooling_pads_with_zero_and_max_pooling_with_nothing(self) -> None:
        scores, inside = torch.tensor([[[3.0, 6.0, 9.0, -1.0]]]), torch.tensor([[True, True, True, False]])
        assert pool_positions(scores, 3, "avg", inside)[0, 0, :3].tolist() == [3.0, 6.0, 5.0]
        assert pool_positions(-scores, 3, "max", inside)[0, 0, :3].tolist() == [-3.0, -3.0, -6.0]

    def test_padding_rows_do_not_dilute_the_mean(self) -> None:
        observation = attending([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.0, 0.2, 0.8]])
        padded = dataclasses.replace(
            observation,
            keys=torch.nn.functional.pad(observation.keys, (0, 0, 1, 0), value=7.0),
            values=torch.nn.functional.pad(observation.values, (0, 0, 1, 0)),
            valid=torch.tensor([[False, False, True, True]]),
        )
        scores = SnapKV(window=3, kernel=1).score(padded)[0, 0]
        torch.testing.assert_close(scores, torch.tensor([0.0, 0.0, 0.6, 0.4]))


class TestKeyDiff:
    def test_the_least_similar_keys_stay(self) -> None:
        keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, -0.3]]]])
        observation = dataclasses.replace(plain(4), keys=keys)
        scores = KeyDiff().score(observation)[0, 0]
        torch.testing.assert_close(scores, torch.tensor([-0.966, -0.987, -0.257, -0.836]), atol=1e-3, rtol=0)
        assert kept(KeyDiff(), observation, 2) == {2, 3}

    def test_the_length_of_a_key_does_not_matter(self) -> None:
        keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, -0.3]]]])
        longer = keys * torch.tensor([1.0, 100.0, 0.01, 5.0])[:, None]
        first, second = (KeyDiff().score(dataclasses.replace(plain(4), keys=k)) for k in (keys, longer))
        torch.testing.assert_close(first, second)

    def test_opposite_and_zero_keys_are_not_nan(self) -> None:
        keys = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]]])
        assert KeyDiff().score(dataclasses.replace(plain(3), keys=keys)).isfinite().all()


def still(positions: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(len(positions), 2), torch.zeros(len(positions), 2)


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States [..., N, 4] with the rotary embedding applied."""
    return states * cos + torch.cat((-states[..., 2:], states[..., :2]), -1) * sin


class TestExpectedAttention:
    def observation(self, covariance: Tensor) -> Observation:
        return Observation(
            keys=torch.tensor([[[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]]),
            values=torch.tensor([[[[3.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]]),
            valid=torch.ones(1, 3, dtype=torch.bool),
            scaling=2**-0.5,
            statistics=QueryStatistics(torch.tensor([[[1.0, 0.0]]]), covariance[None, None]),
            rotary=still,
        )

    @pytest.mark.parametrize(
        ("covariance", "probability"), [((0.0, 0.0), [0.284, 0.576, 0.140]), ((0.0, 4.0), [0.229, 0.464, 0.307])]
    )
    def test_scores(self, covariance: tuple[float, float], probability: list[float]) -> None:
        observation = self.observation(torch.diag(torch.tensor(covariance)))
        expected = torch.tensor(probability)
        bare = ExpectedAttention(sinks=0, value_norm=False).score(observation)[0, 0]
        torch.testing.assert_close(bare, expected, atol=5e-4, rtol=0)
        scores = ExpectedAttention(sinks=0).score(observation)[0, 0]
        torch.testing.assert_close(scores, expected * torch.tensor([3.0, 1.0, 1.0]), atol=1.5e-3, rtol=0)
        assert kept(ExpectedAttention(sinks=0), observation, 1) == {0}

    def test_without_covariance(self) -> None:
        spread, none = (self.observation(torch.diag(torch.tensor([0.0, c]))) for c in (4.0, 0.0))
        policy = ExpectedAttention(sinks=0, covariance=False)
        torch.testing.assert_close(policy.score(spread), ExpectedAttention(sinks=0).score(none))

    def test_epsilon_weighs_with_the_value_norm(self) -> None:
        observation = self.observation(torch.zeros(2, 2))
        plain, shifted = (ExpectedAttention(sinks=0, epsilon=e).score(observation) for e in (0.0, 0.5))
        torch.testing.assert_close(shifted - plain, torch.tensor([[[1.5, 0.5, 0.5]]]))

    def test_sinks_are_left_out_of_the_softmax(self) -> None:
        scores = ExpectedAttention(sinks=1, value_norm=False).score(self.observation(torch.zeros(2, 2)))[0, 0]
        behind = torch.tensor([2.0, 0.0]).mul(2**-0.5).softmax(-1)
        torch.testing.assert_close(scores, torch.cat([torch.zeros(1), behind]))

    def test_the_rotation_is_the_mean_over_the_positions_that_follow(self) -> None:
        """Against turning the mean query to every future position, one by one."""
        policy = ExpectedAttention(future=6, sinks=0, covariance=False, value_norm=False)
        observation = observe(policy, Case(heads=2, group=3, length=9, pads=(0, 4), seed=5))
        assert observation.statistics is not None
        expected = torch.zeros(2, 2, 9)
        for row, length in enumerate((9, 5)):
            cos, sin = rope(torch.arange(length, length + 6))
            future = turned(observation.statistics.mean[row][:, None], cos, sin).mean(1)
            logits = torch.einsum("hgd,htd->hgt", future.view(2, 3, 4), observation.keys[row]) * 0.5
            logits[..., : 9 - length] = float("-inf")
            expected[row] = logits.softmax(-1).mean(1)
        torch.testing.assert_close(policy.score(observation), expected, atol=1e-6, rtol=1e-5)

    def test_the_quadratic_form_is_the_variance_of_the_logit(self) -> None:
        policy = ExpectedAttention(future=1, sinks=0, value_norm=False)
        observation = observe(policy, Case(heads=1, group=1, length=6, pads=(0,), seed=3))
        assert observation.statistics is not None
        cos, sin = rope(torch.tensor([6]))
        rotation = turned(torch.eye(4), cos, sin).T
        mean = rotation @ observation.statistics.mean[0, 0]
        covariance = rotation @ observation.statistics.covariance[0, 0] @ rotation.T
        keys = observation.keys[0, 0]
        logits = keys @ mean * 0.5 + torch.einsum("td,de,te->t", keys, covariance, keys) * 0.25 / 2
        torch.testing.assert_close(policy.score(observation)[0, 0], logits.softmax(-1), atol=1e-6, rtol=1e-4)


class TestRanking:
    def test_order_of_protection(self) -> None:
        valid = torch.tensor([[False, True, True, True, True, True, True]])
        order = protection_order(valid, sinks=2, window=3)
        assert order.tolist() == [[-1, 1, 2, -1, 4, 3, 0]]

    def test_sinks_inside_the_window_are_counted_once(self) -> None:
        valid = torch.ones(1, 3, dtype=torch.bool)
        ranks = rank_entries(torch.zeros(1, 1, 3), valid, sinks=2, window=2)
        assert ranks.tolist() == [[[1, 2, 0]]]

    def test_minus_infinity_is_still_better_than_padding(self) -> None:
        valid = torch.tensor([[False, True, True]])
        ranks = rank_entries(torch.tensor([[[9.0, float("-inf"), 1.0]]]), valid)
        assert ranks.tolist() == [[[2, 1, 0]]]

    def test_budgets_may_differ_between_sequences(self) -> None:
        ranks = torch.arange(4).int().expand(2, 1, 4)
        valid = torch.ones(2, 4, dtype=torch.bool)
        assert keep_mask(ranks, torch.tensor([[1], [9]]), valid).sum(-1).tolist() == [[1], [4]]

    def test_half_precision_scores_keep_their_order(self) -> None:
        scores = torch.tensor([[[1.0, 1.001, 1.002]]])
        assert rank_entries(scores, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[[2, 1, 0]]]
