"""Attention that adds up, as H2O ranks by, that times values, as VATP does, and that of the last row alone, TOVA's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.h2o import H2O, MASS_STATE
from kvsearch.policies.scoring import sum_columns
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tova import TOVA
from kvsearch.policies.vatp import NORM_STATE, VATP
from kvsearch.testing.policy_contract import Case, cases, observe, properties
from tests.policies.course import decode
from tests.policies.examples import NAN, attending, kept, leaves, step_at

ROWS = [
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.6, 0.4, 0.0, 0.0, 0.0],
    [0.5, 0.1, 0.4, 0.0, 0.0],
    [0.4, 0.1, 0.3, 0.2, 0.0],
    [0.3, 0.1, 0.1, 0.2, 0.3],
]
SUMS = [2.8, 0.7, 0.8, 0.4, 0.3]


def received(sums: list[float]) -> Observation:
    """One head that received the attention given."""
    length = len(sums)
    return dataclasses.replace(attending([[1 / length] * length]), column_sums=torch.tensor([[sums]]))


def test_column_sums_of_the_prompt() -> None:
    seen = attending(ROWS)
    sums = sum_columns(seen.queries, seen.keys, seen.valid, seen.scaling)
    torch.testing.assert_close(sums, torch.tensor([[SUMS]]))
    torch.testing.assert_close(H2O().score(dataclasses.replace(seen, column_sums=sums)), sums)


@pytest.mark.parametrize(
    ("policy", "budget", "expected"),
    [
        (H2O(recent=1), 4, {0, 1, 2, 4}),
        (H2O(), 4, {0, 2, 3, 4}),
        (H2O(), 3, {0, 3, 4}),  # of an odd budget, the odd entry is recent
        (H2O(recent_share=0.0), 3, {0, 2, 4}),  # the newest entry always stays
        (H2O(recent_share=1.0), 3, {2, 3, 4}),
        (H2O(sinks=2), 3, {0, 1, 4}),
    ],
)
def test_heavy_and_recent(policy: H2O, budget: int, expected: set[int]) -> None:
    assert kept(policy, received(SUMS), budget) == expected


def test_a_decode_step() -> None:
    """Token 5 arrives: 3.0, .8, .9, .5, .4 received; 5 is the newest, so that 4 leaves."""
    step = arriving([0, 1, 2, 4, 5], [2.8, 0.7, 0.8, 0.3, 0.0], [0.2, 0.1, 0.1, 0.2, 0.4])
    assert leaves(H2O(recent=1), step, budget=4) == [4]
    torch.testing.assert_close(step.cached.state.entries[MASS_STATE], torch.tensor([[3.0, 0.8, 0.9, 0.5, 0.4]]))


def test_the_recent_half_is_protected_while_decoding() -> None:
    def step() -> Step:
        return arriving([5, 0, 4, 1, 2], [0.0, 2.8, 0.3, 0.7, 0.8], [0.4, 0.2, 0.2, 0.1, 0.1])

    assert leaves(H2O(), step(), budget=4) == [1]
    assert leaves(H2O(sinks=2), step(), budget=4) == [2]
    assert leaves(H2O(recent_share=0.0), step(), budget=4) == [4]


def arriving(positions: list[int], mass: list[float], row: list[float]) -> Step:
    step = step_at(positions, row)
    return dataclasses.replace(
        step, cached=dataclasses.replace(step.cached, state=State({MASS_STATE: torch.tensor([mass])}))
    )


HEADS = ([[0.5, 0.1, 0.05, 0.05, 0.3]], [[0.1, 0.1, 0.35, 0.05, 0.4]])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_mean_over_all_heads_of_the_layer_ranks_for_every_head(kv_heads: int) -> None:
    """Two query heads, of one kv head or of two; the newest and the first token may go unless they are protected."""
    observation = attending(*HEADS, kv_heads=kv_heads)
    expected = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.35]).expand(1, kv_heads, 5)
    torch.testing.assert_close(TOVA().score(observation), expected)
    assert all(kept(TOVA(), observation, 3, head) == {0, 2, 4} for head in range(kv_heads))
    inner = attending([[0.1, 0.5, 0.3, 0.1, 0.0]])
    assert kept(TOVA(), inner, 2) == {1, 2}
    assert kept(TOVA(protect_last=True, sinks=1), inner, 2) == {0, 4}


def test_a_decode_step_drops_the_lowest_of_its_own_row() -> None:
    """Tokens 0, 2, 4 and the new 5, with mean attention .1, .4, .3, .2: 0 leaves."""
    step = step_at([4, 0, 5, 2], row=[0.3, 0.1, 0.2, 0.4])
    assert leaves(TOVA(), step, budget=3) == [0]
    assert leaves(TOVA(sinks=1), step, budget=3) == [5]
    assert leaves(TOVA(sinks=1, protect_last=True), step, budget=3) == [4]
    assert (TOVA().row, TOVA().has_decode_rule) == ("layer", True)


VALUES = [[0.1, 0.0], [1.0, -1.0], [-0.5, 0.5], [-4.0, 0.0], [0.0, 1.0]]  # L1 norms .1, 2, 1, 4, 1


def test_accumulated_attention_times_the_value_norm() -> None:
    observation = dataclasses.replace(received(SUMS), values=torch.tensor([[VALUES]]))
    torch.testing.assert_close(VATP().score(observation), torch.tensor([[[0.28, 1.4, 0.8, 1.6, 0.3]]]))
    assert kept(VATP(sinks=1, recent=1), observation, 4) == {0, 1, 3, 4}
    assert kept(VATP(sinks=0, recent=1), observation, 4) == {1, 2, 3, 4}  # the sink's value is short: it is lost


def test_a_decode_step_of_masses_times_norms() -> None:
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


@properties
@given(cases(max_length=9), st.integers(1, 10))
def test_the_state_is_mass_and_norm_of_what_is_held(case: Case, budget: int) -> None:
    observation = observe(VATP(), case)
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
