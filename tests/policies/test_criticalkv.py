from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvsearch.policies import Observation, QueryStatistics
from kvsearch.policies.base import Norm
from kvsearch.policies.criticalkv import CriticalKV
from kvsearch.policies.ranking import rank_under
from kvsearch.policies.scoring import projected_norms
from kvsearch.policies.snapkv import SnapKV
from kvsearch.testing.policy_contract import Case, no_rope, observe
from tests.policies.examples import attending, kept

NORMS = [1.0, 1.0, 4.0, 2.0]


def fixed(*norms: Sequence[float]) -> Any:
    """A projection that says what the norms are, one row per query head of one kv head."""
    return lambda values, order: torch.tensor(norms)[None, None]


def expecting(attention: list[float]) -> Observation:
    """Expected attention as given, to every entry, whatever the order of the norms."""
    keys = torch.zeros(1, 1, len(attention), 4)
    keys[0, 0, :, 0] = torch.tensor(attention).log()
    statistics = QueryStatistics(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), torch.zeros(1, 1, 4, 4))
    return Observation(
        keys, keys, torch.ones(1, len(attention), dtype=torch.bool), 1.0, statistics={0: statistics}, rotary=no_rope
    )


class TestExample:
    """Base scores .4, .3, .2, .1 and norms 1, 1, 4, 2: a budget of 2 takes 0 by score and 2 by .8."""

    policy = CriticalKV(base="expected_attention", window=0)
    observation = dataclasses.replace(expecting([0.4, 0.3, 0.2, 0.1]), projection=fixed(NORMS))

    def test_both_stages(self) -> None:
        torch.testing.assert_close(
            self.policy.score(self.observation)[0, 0], torch.tensor([0.4, 0.3, 0.8, 0.2]), atol=5e-4, rtol=0
        )
        torch.testing.assert_close(self.policy.first_stage(self.observation)[0, 0], torch.tensor([0.4, 0.3, 0.2, 0.1]))
        assert kept(self.policy, self.observation, 2) == {0, 2}

    @pytest.mark.parametrize(("ratio", "expected"), [(0.0, {0, 2}), (0.5, {0, 2}), (1.0, {0, 1})])
    def test_how_much_the_first_stage_takes(self, ratio: float, expected: set[int]) -> None:
        assert kept(dataclasses.replace(self.policy, ratio=ratio), self.observation, 2) == expected

    def test_every_budget(self) -> None:
        """The first stage has 0, 1, 1, 2 entries of budgets 1 to 4."""
        assert [kept(self.policy, self.observation, budget) for budget in range(1, 5)] == [
            {2}, {0, 2}, {0, 1, 2}, {0, 1, 2, 3},
        ]  # fmt: skip
        assert rank_under(self.policy, self.observation)[0, 0].tolist() == [1, 2, 0, 3]


def test_protected_entries_count_in_the_first_stage() -> None:
    """Four candidates and the newest token, which is protected: of a budget of 4 it and entry 0 are the first two."""
    observation = dataclasses.replace(
        attending([[0.4, 0.3, 0.2, 0.1, 0.0]]), projection=fixed([0.1, 1.0, 4.0, 2.0, 0.001])
    )
    policy = CriticalKV(window=1, kernel=1)
    assert kept(policy, observation, 2) == {2, 4}
    assert kept(policy, observation, 4) == {0, 1, 2, 4}
    assert kept(dataclasses.replace(policy, ratio=0.0), observation, 4) == {1, 2, 3, 4}


def test_norms_of_the_group_are_averaged_and_epsilon_lifts_entries_without_attention() -> None:
    observation = dataclasses.replace(
        attending([[0.5, 0.0, 0.5, 0.0]], [[0.5, 0.0, 0.5, 0.0]]),
        projection=fixed([1.0, 6.0, 0.0, 0.0], [3.0, 8.0, 0.5, 0.0]),
    )
    scores = CriticalKV(window=1, kernel=1, epsilon=0.1).score(observation)[0, 0, :3]
    torch.testing.assert_close(scores, torch.tensor([0.6 * 2.0, 0.1 * 7.0, 0.6 * 0.25]))


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_norm_is_that_of_the_projected_values(norm: Norm) -> None:
    policy = CriticalKV(window=2, norm=norm)
    weight = torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(3))
    observation = dataclasses.replace(
        observe(policy, Case(heads=2, group=3, length=12, pads=(0, 3), seed=8)),
        projection=lambda values, order: projected_norms(values, weight, order),
    )
    norms = projected_norms(observation.values, weight, norm).mean(2)
    base = SnapKV(window=2).score(observation)
    torch.testing.assert_close(policy.score(observation)[..., 3:-2], ((base + 1e-4) * norms)[..., 3:-2])


def test_expected_attention_does_without_its_own_value_norms() -> None:
    observation = expecting([0.4, 0.3, 0.2, 0.1])
    larger = dataclasses.replace(observation, values=observation.values + 100.0, projection=fixed(NORMS))
    policy = CriticalKV(base="expected_attention", window=0)
    torch.testing.assert_close(policy.first_stage(larger)[0, 0], torch.tensor([0.4, 0.3, 0.2, 0.1]))


def test_entries_without_a_norm_are_no_nan() -> None:
    """A prompt inside the window has no candidates, and max pooling over nothing is minus infinity."""
    observation = dataclasses.replace(attending([[0.5, 0.3, 0.2]]), projection=fixed([0.0, 1.0, 0.0]))
    assert CriticalKV(window=3).score(observation).isfinite().all()


@pytest.mark.parametrize(
    ("ratio", "budgets", "quota"),
    [(0.5, [1, 2, 3, 4, 2**40], [0, 1, 1, 2, 2**39]), (0.29, [100, 99], [29, 28]), (1.0, [7], [7]), (0.0, [7], [0])],
)
def test_quota(ratio: float, budgets: list[int], quota: list[int]) -> None:
    """0.29 * 100 is 28.999... in floating point."""
    assert [CriticalKV(ratio=ratio).first_stage_budget(budget) for budget in budgets] == quota
