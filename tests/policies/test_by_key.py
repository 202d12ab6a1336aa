"""Policies that rank by keys alone: their norms, and how alike they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.keydiff import BELOW_ONE, KeyDiff
from kvsearch.policies.knorm import NORM, Knorm
from tests.policies.examples import check_order_of_slots, kept, leaves, plain, scattered, step_at


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


def test_the_largest_norm_leaves_while_decoding() -> None:
    """Norms 1 and .5 are held, a key of norm -1.5 arrives; slots in any order."""
    step = started(step_at([1, -1, 4, 3], keys=[1.0, 77.0, -1.5, 0.5]))
    assert leaves(Knorm(), step, budget=2) == [4]
    assert leaves(Knorm(window=1), step, budget=2) == [1]
    larger = started(step_at([1, -1, 4, 3], keys=[9.0, 77.0, -1.5, 0.5]))
    assert leaves(Knorm(), larger, budget=2) == [1]
    assert leaves(Knorm(sinks=2), larger, budget=2) == [4]


@pytest.mark.parametrize("seed", range(5))
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


def test_opposite_and_zero_keys_are_not_nan() -> None:
    keys = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]]])
    assert KeyDiff().score(dataclasses.replace(plain(3), keys=keys)).isfinite().all()


@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_no_priority_is_below_zero(scale: float) -> None:
    """Keys in one direction, as near to the mean as can be."""
    step = scattered(0, slots=50, dim=64)
    keys = torch.ones_like(step.cached.keys) * scale + torch.randn_like(step.cached.keys) * 1e-7 * scale
    step = dataclasses.replace(step, cached=dataclasses.replace(step.cached, keys=keys))
    assert (KeyDiff().step(step) >= 0).all()


def test_the_most_similar_key_leaves_while_decoding() -> None:
    """Of the example's keys 1 is most similar to the mean direction, the newest is protected by a window only."""
    keys = torch.tensor([[[1.0, 0.1], [0.9, -0.3], [7.0, 7.0], [0.0, 1.0], [1.0, 0.0]]])
    step = step_at([1, 3, -1, 2, 0])
    step = dataclasses.replace(step, cached=dataclasses.replace(step.cached, keys=keys))
    cosines = _scores(KeyDiff().step(step)[0, [4, 0, 3, 1]], keys[0, [4, 0, 3, 1]])
    torch.testing.assert_close(cosines, torch.tensor([-0.966, -0.987, -0.257, -0.836]), atol=1e-3, rtol=0)
    assert leaves(KeyDiff(), step, budget=3) == [1]
    assert leaves(KeyDiff(window=1, sinks=2), step, budget=3) == [2]
