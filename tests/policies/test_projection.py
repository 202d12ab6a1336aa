"""Norms of projected values against the projection itself, and the policies that weigh attention by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.policies import Observation, QueryStatistics, scoring
from kvsearch.policies.base import Norm
from kvsearch.policies.criticalkv import CriticalKV
from kvsearch.policies.defensivekv import DefensiveKV
from kvsearch.policies.ranking import rank_under
from kvsearch.policies.scoring import projected_norms
from kvsearch.policies.snapkv import SnapKV
from kvsearch.testing.policy_contract import Case, no_rope, observe
from tests.policies.examples import attending, kept

BATCH, HEADS, GROUP, LENGTH, DIM, WIDTH = 2, 3, 4, 17, 8, 24
both = pytest.mark.parametrize("order", ["l1", "l2"])


def states() -> tuple[Tensor, Tensor]:
    """Values and W_O."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator)
    return values, torch.randn(HEADS * GROUP, DIM, WIDTH, generator=generator)


def by_definition(values: Tensor, weight: Tensor, order: Norm) -> Tensor:
    heads = [(values[:, head // GROUP] @ weight[head]).norm(p=int(order[1]), dim=-1) for head in range(len(weight))]
    return torch.stack(heads, 1).view(BATCH, HEADS, GROUP, -1)


def test_by_hand() -> None:
    values = torch.tensor([[[[1.0, 2.0], [0.0, -1.0]]]])
    weight = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]])  # v W = [3, 4] and [-1, -2]
    torch.testing.assert_close(projected_norms(values, weight, "l1"), torch.tensor([[[[7.0, 3.0]]]]))
    torch.testing.assert_close(projected_norms(values, weight, "l2"), torch.tensor([[[[5.0, 5.0**0.5]]]]))


@both
@pytest.mark.parametrize("scratch", [1, 10**9])
def test_the_size_of_the_scratch_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, scratch: int, order: Norm
) -> None:
    values, weight = states()
    monkeypatch.setattr(scoring, "CHUNK_BYTES", scratch)
    torch.testing.assert_close(projected_norms(values, weight, order), by_definition(values, weight, order))


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


class TestCriticalKV:
    """Base scores .4, .3, .2, .1 and norms 1, 1, 4, 2: a budget of 2 takes 0 by score and 2 by .8."""

    policy = CriticalKV(base="expected_attention", window=0)
    observation = dataclasses.replace(expecting([0.4, 0.3, 0.2, 0.1]), projection=fixed(NORMS))

    def test_both_stages(self) -> None:
        torch.testing.assert_close(
            self.policy.score(self.observation)[0, 0], torch.tensor([0.4, 0.3, 0.8, 0.2]), atol=5e-4, rtol=0
        )
        torch.testing.assert_close(self.policy.first_stage(self.observation)[0, 0], torch.tensor([0.4, 0.3, 0.2, 0.1]))
        assert kept(self.policy, self.observation, 2) == {0, 2}
        assert kept(dataclasses.replace(self.policy, ratio=1.0), self.observation, 2) == {0, 1}

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


@pytest.mark.parametrize(
    ("ratio", "budgets", "quota"),
    [(0.5, [1, 2, 3, 4, 2**40], [0, 1, 1, 2, 2**39]), (0.29, [100, 99], [29, 28]), (1.0, [7], [7]), (0.0, [7], [0])],
)
def test_quota(ratio: float, budgets: list[int], quota: list[int]) -> None:
    """0.29 * 100 is 28.999... in floating point."""
    assert [CriticalKV(ratio=ratio).first_stage_budget(budget) for budget in budgets] == quota


class TestDefensiveKV:
    """Two query heads of a group over four candidates and the newest entry, which is protected; norms 1, 1, 1, 3.

    The larger attention of the two is .5, .1, .4, .05, on average .2625, and norms are 1/6, 1/6, 1/6, 1/2 of all. The
    mean attention is .3, .1, .25, .05, and .3 to the newest entry.
    """

    policy = DefensiveKV(window=1, kernel=1)
    observation = dataclasses.replace(
        attending([[0.5, 0.1, 0.1, 0.05, 0.25]], [[0.1, 0.1, 0.4, 0.05, 0.35]]),
        projection=fixed([1.0, 1.0, 1.0, 3.0, 9.0], [1.0, 1.0, 1.0, 3.0, 1.0]),
    )

    def test_the_largest_attention_and_its_floor_times_the_norms(self) -> None:
        scores = dataclasses.replace(self.policy, mass=0.0).score(self.observation)[0, 0, :4]
        torch.testing.assert_close(scores, torch.tensor([0.5, 0.2625, 0.4, 3 * 0.2625]) / 6)

    def test_its_parts(self) -> None:
        """Means of .3, .1, .25 and .05 in place of the maxima: .175 on average, and no floor is the maxima alone."""
        bare = dataclasses.replace(self.policy, mass=0.0)
        mean = dataclasses.replace(bare, aggregate="mean").score(self.observation)[0, 0, :4]
        torch.testing.assert_close(mean, torch.tensor([0.3, 0.175, 0.25, 3 * 0.175]) / 6)
        none = dataclasses.replace(bare, floor="none").score(self.observation)[0, 0, :4]
        torch.testing.assert_close(none, torch.tensor([0.5, 0.1, 0.4, 3 * 0.05]) / 6)
        both = dataclasses.replace(bare, aggregate="mean", floor="none").score(self.observation)[0, 0, :4]
        torch.testing.assert_close(both, torch.tensor([0.3, 0.1, 0.25, 3 * 0.05]) / 6)

    @pytest.mark.parametrize(
        ("mass", "first", "expected"),
        [(0.0, set(), {0, 2, 3, 4}), (0.9, {0, 2}, {0, 2, 3, 4}), (1.0, {0, 1, 2}, {0, 1, 2, 4})],
    )
    def test_what_is_attended_to_most_is_taken_first(self, mass: float, first: set[int], expected: set[int]) -> None:
        """With the newest entry 0 and 2 make up .85 and 1, too, .95: all that stay below the mass are first."""
        policy = dataclasses.replace(self.policy, mass=mass)
        scores = policy.score(self.observation)[0, 0]
        assert set(torch.nonzero(scores >= 2).flatten().tolist()) == first
        assert kept(policy, self.observation, 4) == expected


def test_rows_are_pooled_and_keep_their_mass() -> None:
    """.4, 0, 0, .2 are .4/3, .4/3, .2/3, .2/3 when pooled over three, and 1.5 times as much to add up to .6 again."""
    observation = dataclasses.replace(attending([[0.4, 0.0, 0.0, 0.2, 0.4]]), projection=fixed([1.0] * 5))
    scores = DefensiveKV(window=1, kernel=3, mass=0.0).score(observation)[0, 0, :4]
    torch.testing.assert_close(scores, torch.tensor([0.2, 0.2, 0.15, 0.15]) / 4)
