"""CaM by its definition, and the noise that it draws by."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies.cam import CaM
from kvsearch.policies.decoding import Cached, State
from kvsearch.policies.h2o import MASS_STATE
from kvsearch.policies.random import uniform
from kvsearch.testing.policy_contract import Case, cases, observe, properties
from tests.policies.course import decode, merged, some_slots
from tests.policies.examples import NAN, scattered, step_at


def holding(values: list[float], mass: list[float], positions: list[int]) -> Cached:
    """One head with values of one number each."""
    cached = step_at(positions, keys=[float(position) for position in positions]).cached
    state = State({MASS_STATE: torch.tensor([mass])})
    return dataclasses.replace(cached, values=torch.tensor([values])[..., None], state=state)


def values_after(policy: CaM, cached: Cached, leaving: list[list[int]]) -> Tensor:
    """Values [S, C, Dv] after a merge; nothing else changes."""
    after = merged(policy, cached, leaving)
    torch.testing.assert_close(after.keys, cached.keys, rtol=0, atol=0, equal_nan=True)
    return after.values


# in slots out of order: 7 leaves; 8 and 9 are the next two that stay, 3 is before it, 12 behind them
ENTRY = holding([100.0, 4.0, NAN, 10.0, 1.0, 20.0], [0.7, 0.2, 0.0, 0.5, 0.9, 0.3], [3, 7, -1, 9, 12, 8])


def test_the_expected_value() -> None:
    """Mass .2 against a mean of .4: half of the value, 4, goes to the next two, in equal parts."""
    values = values_after(CaM(merge_next=2, expectation=True), ENTRY, [[1]])
    torch.testing.assert_close(values[0, :, 0], torch.tensor([100.0, 4.0, NAN, 11.0, 1.0, 21.0]), equal_nan=True)


def many(seed: int, share: float) -> tuple[Cached, list[list[int]]]:
    """Heads with entries in any slots, some without mass, and slots that leave, ascending by position."""
    generator = torch.Generator().manual_seed(seed)
    step = scattered(seed, segments=3, slots=13)
    mass = step.row * (torch.rand(step.row.shape, generator=generator) < 0.8)
    cached = dataclasses.replace(step.cached, state=State({MASS_STATE: mass}), layer=seed % 5)
    return cached, some_slots(step, share, generator)


def by_definition(policy: CaM, cached: Cached, lists: list[list[int]]) -> Tensor:
    """Values after the merge of the youngest entry of each head."""
    values = cached.values.double().clone()
    for segment, gone in enumerate(lists):
        position, mass = cached.positions[segment].tolist(), cached.state.entries[MASS_STATE][segment].tolist()
        stays = [slot for slot, at in enumerate(position) if at >= 0 and slot not in gone]
        for slot in gone[-1:]:
            later = sorted((at for at in stays if position[at] > position[slot]), key=position.__getitem__)
            following = later[: policy.merge_next]
            total = sum(mass[at] for at in following)
            if not following or mass[slot] == 0:
                continue
            share = min(1.0, mass[slot] * len(following) / total) if total else 1.0
            if not policy.expectation:
                share = float(uniform(policy.seed, cached.layer, cached.heads[segment], position[slot])) < share
            for at in following:
                values[segment, at] += share * cached.values[segment, slot].double() / len(following)
    return values


seeds, shares = st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9])
several = st.sampled_from([1, 2, 5, 32])
policies = st.builds(CaM, merge_next=several, seed=st.integers(0, 9), expectation=st.booleans())


@properties
@given(seeds, shares, policies)
def test_by_definition(seed: int, share: float, policy: CaM) -> None:
    cached, lists = many(seed, share)
    if max(map(len, lists)):
        expected = by_definition(policy, cached, lists).float()
        torch.testing.assert_close(values_after(policy, cached, lists), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@properties
@given(cases(max_length=8), st.integers(1, 9), st.sampled_from([CaM(sinks=1), CaM(base="h2o", sinks=0, merge_next=2)]))
def test_decoding(case: Case, budget: int, policy: CaM) -> None:
    """The base decides; masses are those of H2O; every entry that leaves is merged as defined."""
    observation = observe(policy, case)
    prompt = observation.received().flatten(0, 1)
    for moment in decode(policy, observation, budget, steps=5, seed=case.seed):
        cached, before = moment.step.cached, moment.before
        mass = cached.state.entries[MASS_STATE]
        expected = mass if policy.base == "h2o" else before.positions.float()
        assert torch.equal(moment.priorities[before.held], expected[before.held])
        lists = [[slot for slot in line if slot >= 0] for line in moment.leaving.tolist()]
        values = by_definition(policy, before, lists).float()
        torch.testing.assert_close(cached.values, values, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert torch.equal(cached.keys[before.held], before.keys[before.held])
        for segment, rows in enumerate(moment.rows):
            pads = case.pads[segment // case.heads]
            for position, value in moment.entries(mass, segment).items():
                column = position + pads
                total = float(prompt[segment, column]) if column < case.length else 0.0
                assert value == pytest.approx(total + sum(row.get(position, 0.0) for row in rows), rel=1e-5, abs=1e-6)


MASK = 2**64 - 1


def mixed(state: int) -> int:
    """The finaliser of SplitMix64 on Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def reference(*keys: int) -> float:
    state = 0
    for key in keys:
        state = mixed((state + 0x9E3779B97F4A7C15 + key) & MASK)
    return (state >> 40) / 2**24


def test_one_key_is_splitmix64() -> None:
    """The published generator's first output for seed 0 is e220a8397b1dcdaf."""
    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert uniform(0).item() == 0xE220A8 / 2**24


@properties
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_against_unbounded_integers(keys: list[int]) -> None:
    assert uniform(*keys).item() == reference(*keys)
    assert uniform(*map(torch.tensor, keys)).item() == reference(*keys)
