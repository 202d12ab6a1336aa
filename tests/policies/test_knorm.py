from __future__ import annotations

import dataclasses

import pytest
import torch

from kvsearch.policies.decoding import State, Step
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
