from __future__ import annotations

import dataclasses

import pytest
import torch

from kvsearch.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.knorm import NORM, Knorm
from tests.policies.contract import Case, PolicyContract, observe
from tests.policies.examples import NAN, check_order_of_slots, kept, leaves, plain, scattered, step_at


class TestContract(PolicyContract):
    policy = Knorm()


class TestContractProtected(PolicyContract):
    policy = Knorm(sinks=2, window=3)


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


def test_a_step_reads_the_newest_key_only() -> None:
    step = started(scattered(3))
    newest = step.at_newest(step.cached.keys).clone()
    step.cached.keys.fill_(NAN)
    step.cached.keys[torch.arange(len(newest)), step.newest] = newest
    assert not Knorm().step(step).isnan().any()


def test_the_state_starts_with_the_norms_of_the_prompt() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        observation = observe(Knorm(), Case(heads=2, group=1, length=7, pads=(0, 2), seed=1), dtype)
        state = Knorm().start(observation)
        assert list(state.entries) == [NORM]
        assert not state.heads
        assert torch.equal(state.entries[NORM], -Knorm().score(observation))
        assert state.entries[NORM].dtype == torch.float32


@pytest.mark.parametrize("name", ["sinks", "window"])
def test_out_of_range(name: str) -> None:
    with pytest.raises(UsageError, match=f"^policy knorm: {name} must be 0 or more, got -1$"):
        create_policy("knorm", {name: -1})
