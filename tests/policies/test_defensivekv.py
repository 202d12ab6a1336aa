from __future__ import annotations

import dataclasses

import pytest
import torch

from kvsearch.policies.defensivekv import DefensiveKV
from tests.policies.examples import attending, kept
from tests.policies.test_criticalkv import fixed


class TestExample:
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


def test_the_mean_is_over_the_rows_of_the_window() -> None:
    """Two rows with .4 and .2 for the first candidate, of one query head."""
    rows = [[0.4, 0.1, 0.5, 0.0], [0.2, 0.3, 0.25, 0.25]]
    observation = dataclasses.replace(attending(rows), projection=fixed([1.0] * 4))
    policy = DefensiveKV(window=2, kernel=1, mass=0.0, aggregate="mean", floor="none")
    torch.testing.assert_close(policy.score(observation)[0, 0, :2], torch.tensor([0.3, 0.2]) / 2)
