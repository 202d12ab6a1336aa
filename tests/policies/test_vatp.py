from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.policies.decoding import State, Step
from kvsearch.policies.h2o import H2O, MASS_STATE
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.vatp import NORM_STATE, VATP
from kvsearch.testing.policy_contract import Case, cases, observe, properties
from tests.policies.course import decode
from tests.policies.examples import NAN, attending, kept, leaves, step_at
from tests.policies.test_h2o import SUMS, received

VALUES = [[0.1, 0.0], [1.0, -1.0], [-0.5, 0.5], [-4.0, 0.0], [0.0, 1.0]]  # L1 norms .1, 2, 1, 4, 1


def test_accumulated_attention_times_the_value_norm() -> None:
    observation = dataclasses.replace(received(SUMS), values=torch.tensor([[VALUES]]))
    torch.testing.assert_close(VATP().score(observation), torch.tensor([[[0.28, 1.4, 0.8, 1.6, 0.3]]]))
    assert kept(VATP(sinks=1, recent=1), observation, 4) == {0, 1, 3, 4}
    assert kept(VATP(sinks=0, recent=1), observation, 4) == {1, 2, 3, 4}  # the sink's value is short: it is lost
    assert kept(VATP(sinks=1, recent=1), observation, 3) == {0, 3, 4}


def test_a_decode_step() -> None:
    """Token 5 arrives with a value of norm 3: masses 3.0, .8, .6, .4, .4 times .1, 2, 4, 1, 3."""

    def step() -> Step:
        arriving = step_at([4, 1, 0, 3, 5], [0.1, 0.1, 0.2, 0.2, 0.4])
        state = State(
            {
                MASS_STATE: torch.tensor([[0.3, 0.7, 2.8, 0.4, 0.0]]),
                NORM_STATE: torch.tensor([[1.0, 2.0, 0.1, 4.0, 0.0]]),
            }
        )
        values = torch.full((1, 5, 2), NAN)
        values[0, 4] = torch.tensor([-1.0, 2.0])
        return dataclasses.replace(arriving, cached=dataclasses.replace(arriving.cached, state=state, values=values))

    torch.testing.assert_close(VATP(sinks=1).step(step()), torch.tensor([[0.4, 1.6, 0.3, 2.4, 1.2]]))
    assert leaves(VATP(sinks=1, recent=1), step(), budget=4) == [4]
    assert leaves(VATP(sinks=0, recent=1), step(), budget=4) == [0]
    assert leaves(VATP(sinks=1, recent=2), step(), budget=4) == [1]


@properties
@given(cases(max_length=9), st.integers(1, 10))
def test_the_state_is_mass_and_norm_of_what_is_held(case: Case, budget: int) -> None:
    observation = observe(VATP(), case)
    plain = decode(H2O(), observation, 100, steps=5, seed=case.seed)  # the same tokens
    for moment, whole in zip(decode(VATP(sinks=1), observation, 100, steps=5, seed=case.seed), plain, strict=True):
        held = moment.before.held
        norms = moment.step.cached.values.abs().sum(-1)
        torch.testing.assert_close(moment.step.cached.state.entries[NORM_STATE][held], norms[held])
        torch.testing.assert_close(moment.priorities[held], (whole.priorities * norms)[held])
    for moment in decode(VATP(sinks=1), observation, budget, steps=5, seed=case.seed):
        mass, norms = (moment.step.cached.state.entries[name] for name in (MASS_STATE, NORM_STATE))
        held = moment.before.held
        torch.testing.assert_close(moment.step.cached.values.abs().sum(-1) * held, norms)
        assert torch.equal(moment.priorities, mass * norms)


HISTORY = [[0.7, 0.2, 0.1, 0.0, 0.0], [0.1, 0.3, 0.4, 0.2, 0.0], [0.3, 0.1, 0.2, 0.2, 0.2]]


def test_mean_over_a_history_times_the_value_norm() -> None:
    """Of the last two rows the mean is .2, .2, .3, .2, .1; times .1, 2, 1, 4, 1."""
    policy = VATP(base="scissorhands", sinks=0, recent=1, history=2)
    observation = dataclasses.replace(attending(HISTORY), values=torch.tensor([[VALUES]]))
    torch.testing.assert_close(policy.score(observation), torch.tensor([[[0.02, 0.4, 0.3, 0.8, 0.1]]]))
    assert kept(policy, observation, 3) == {1, 3, 4}
    assert kept(dataclasses.replace(policy, sinks=1), observation, 3) == {0, 3, 4}
    assert kept(dataclasses.replace(policy, history=3, recent=3), observation, 4) == {1, 2, 3, 4}


@properties
@given(cases(), st.sampled_from(["max", "avg", "none"]))
def test_snapkv_is_pooled_before_it_is_weighed(case: Case, pooling: str) -> None:
    policy = VATP(base="snapkv", window=3, kernel=3, pooling=pooling, sinks=1, group="max")
    base = SnapKV(window=3, kernel=3, pooling=pooling, sinks=1, group="max")
    observation = observe(policy, case)
    candidate = (observation.index >= 0) & (observation.index < observation.seen[:, None] - 3)
    chosen = candidate[:, None].expand(observation.keys.shape[:3])
    pooled = base.score(observation) * observation.values.abs().sum(-1)
    torch.testing.assert_close(policy.score(observation)[chosen], pooled[chosen])
