"""Policies that rank by keys alone, their norms and how alike they are, and those that rank by position."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.duo_attention import DuoAttention
from kvsearch.policies.keydiff import BELOW_ONE, KeyDiff
from kvsearch.policies.knorm import NORM, Knorm
from kvsearch.policies.streaming import StreamingLLM
from kvsearch.testing.policy_contract import Case, observe
from tests.policies.examples import check_order_of_slots, keep_under, kept, leaves, plain, scattered, step_at


def started(step: Step) -> Step:
    """The step with the norms of all entries but the newest as state, zeros elsewhere."""
    norms = step.cached.keys.norm(dim=-1) * step.cached.held
    norms[torch.arange(len(norms)), step.newest] = 0.0
    return dataclasses.replace(step, cached=dataclasses.replace(step.cached, state=State({NORM: norms})))


def test_low_norms_stay() -> None:
    keys = torch.tensor([[[[3.0, 0.0], [0.6, -0.8], [0.0, 2.0], [0.5, 0.0]]]])
    observation = dataclasses.replace(plain(4), keys=keys)
    torch.testing.assert_close(Knorm().score(observation), torch.tensor([[[-3.0, -1.0, -2.0, -0.5]]]))
    assert kept(Knorm(), observation, 2) == {1, 3}
    assert kept(Knorm(sinks=1), observation, 2) == {0, 3}
    assert kept(Knorm(window=2), observation, 3) == {1, 2, 3}


@pytest.mark.parametrize("seed", range(3))
def test_priorities_are_the_norms_of_what_is_held(seed: int) -> None:
    step = started(scattered(seed))
    check_order_of_slots(Knorm(), started(scattered(seed)), seed)
    priorities, held = Knorm().step(step), step.cached.held
    torch.testing.assert_close(priorities[held], -step.cached.keys.norm(dim=-1)[held])
    norms = step.cached.state.entries[NORM]
    torch.testing.assert_close(norms[held], step.cached.keys.norm(dim=-1)[held])
    assert bool((norms[~held] == 0).all())


def test_the_least_similar_keys_stay() -> None:
    keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, -0.3]]]])
    observation = dataclasses.replace(plain(4), keys=keys)
    scores = KeyDiff().score(observation)[0, 0]
    torch.testing.assert_close(scores, torch.tensor([-0.966, -0.987, -0.257, -0.836]), atol=1e-3, rtol=0)
    assert kept(KeyDiff(), observation, 2) == {2, 3}
    opposite = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]]])
    assert KeyDiff().score(dataclasses.replace(plain(3), keys=opposite)).isfinite().all()


@pytest.mark.parametrize("seed", range(3))
def test_a_decode_step_ranks_what_is_held_as_a_prompt_would_be(seed: int) -> None:
    step = scattered(seed)
    check_order_of_slots(KeyDiff(), step, seed)
    priorities = KeyDiff().step(step)
    for segment, held in enumerate(step.cached.held):
        keys = step.cached.keys[segment, held][None, None]
        alone = Observation(keys, keys, torch.ones(1, int(held.sum()), dtype=torch.bool), 1.0)
        torch.testing.assert_close(_scores(priorities[segment, held], keys[0, 0]), KeyDiff().score(alone)[0, 0])


def _scores(priorities: Tensor, keys: Tensor) -> Tensor:
    """Scores of priorities [C] of a decode step: those are |m| (1 + c score), m the sum of unit keys [C, D]."""
    length = F.normalize(keys, dim=-1).sum(0).norm()
    return (priorities / length - 1) / BELOW_ONE


def test_no_priority_is_below_zero() -> None:
    """Keys in one direction, as near to the mean as can be."""
    step = scattered(0, slots=50, dim=64)
    keys = torch.ones_like(step.cached.keys) + torch.randn_like(step.cached.keys) * 1e-7
    step = dataclasses.replace(step, cached=dataclasses.replace(step.cached, keys=keys))
    assert (KeyDiff().step(step) >= 0).all()


def test_the_example() -> None:
    """Half of the heads stream: sinks 1 and recent 2 of a prompt of 8."""
    budgets = np.array([[8, 3], [3, 8]])
    policy = DuoAttention(sinks=1, window=2)
    observation = observe(policy, Case(heads=2, group=1, length=8, pads=(0,), seed=1))
    for layer in budgets:
        for mask, streams in zip(
            keep_under(policy, observation, torch.tensor(layer)[None])[0], layer == 3, strict=True
        ):
            assert torch.nonzero(mask).flatten().tolist() == ([0, 6, 7] if streams else list(range(8)))


STREAMING = [StreamingLLM(sinks=2), DuoAttention(sinks=2, window=3)]  # below, at and above 5 entries they keep the same


@pytest.mark.parametrize("policy", STREAMING)
@pytest.mark.parametrize(("budget", "expected"), [(1, {7}), (2, {0, 7}), (5, {0, 1, 5, 6, 7})])
def test_sinks_and_recent(policy: StreamingLLM, budget: int, expected: set[int]) -> None:
    assert kept(policy, plain(8), budget) == expected


def test_heads_with_more_than_a_streaming_heads_budget_that_covers_the_prompt_are_never_evicted() -> None:
    policy = DuoAttention(sinks=2, window=3)
    exempt = [policy.keeps_all(budget, length) for budget, length in ((7, 8), (8, 8), (9, 8), (5, 4))]
    assert exempt == [False, True, True, False]  # 5 entries are a streaming head, however short the prompt


@pytest.mark.parametrize("policy", STREAMING)
@pytest.mark.parametrize(
    ("held", "expected"),
    [([6, 0, 5, 1, 7], 5), ([7, 0, 1], 7), ([7], 7)],
)
def test_a_decode_step_drops_the_oldest_entry_behind_the_sinks(
    policy: StreamingLLM, held: list[int], expected: int
) -> None:
    """Token 8 arrives where the prompt left these; below three entries it and sinks stay."""
    assert leaves(policy, step_at([*held, 8]), budget=len(held)) == [expected]
