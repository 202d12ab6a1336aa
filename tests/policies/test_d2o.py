from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies.d2o import D2O, TAU
from kvsearch.policies.decoding import Cached, State
from kvsearch.policies.h2o import H2O, MASS_STATE
from kvsearch.testing.policy_contract import properties
from tests.policies.course import merged, some_slots
from tests.policies.examples import NAN, kept, scattered
from tests.policies.test_h2o import SUMS, received


def test_the_score_is_that_of_h2o_with_sinks() -> None:
    assert kept(D2O(sinks=0), received(SUMS), 4) == {0, 2, 3, 4}
    assert kept(D2O(sinks=2), received(SUMS), 4) == {0, 1, 3, 4}
    assert [D2O().first_stage_budget(budget) for budget in range(1, 12)] == [
        H2O(sinks=4).first_stage_budget(budget) for budget in range(1, 12)
    ]
    assert D2O(recent_share=0.25).recent_at(8) == 2  # three heavy ones for each recent one


def holding(keys: list[list[float]], values: list[float], tau: float = math.nan) -> Cached:
    """One head with entries 0, 1, 2, ..., in this order, behind an empty slot."""
    states = torch.tensor([[[NAN] * len(keys[0]), *keys]])
    return Cached(
        states,
        torch.tensor([[NAN, *values]])[..., None],
        torch.arange(-1, len(keys))[None],
        State({MASS_STATE: torch.zeros(1, len(keys) + 1)}, {TAU: torch.tensor([tau])}),
        layer=0,
        heads=torch.zeros(1, dtype=torch.int64),
    )


FOUR = [[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [0.6, 0.8]]  # cosines of entry 2 to the others: .8, .6, .96


@pytest.mark.parametrize(
    ("merging", "key", "value"), [("paper", [0.698, 0.702], 30 * 0.51 + 10 * 0.49), ("code", [0.684, 0.688], 19.8)]
)
def test_the_most_similar_entry_takes_it_in(merging: str, key: list[float], value: float) -> None:
    """exp(.96) / (exp(.96) + e) = .490; or the mean of [.6, .8] and .96 * [.8, .6]."""
    after = merged(D2O(merging=merging), holding(FOUR, [1.0, 2.0, 10.0, 30.0]), [[3]])
    expected = torch.tensor([[NAN, NAN], [1.0, 0.0], [0.0, 1.0], [0.8, 0.6], key])
    torch.testing.assert_close(after.keys[0], expected, atol=5e-4, rtol=0, equal_nan=True)
    expected = torch.tensor([NAN, 1.0, 2.0, 10.0, value])
    torch.testing.assert_close(after.values[0, :, 0], expected, atol=5e-3, rtol=0, equal_nan=True)
    torch.testing.assert_close(after.state.heads[TAU], torch.tensor([0.96]))


@pytest.mark.parametrize(
    ("tau", "ema", "later", "merges"),
    [
        (math.nan, 0.5, 0.96, True),
        (0.5, 0.5, 0.73, True),
        (0.96, 0.5, 0.96, True),  # as similar as the threshold
        (0.98, 0.5, 0.97, False),
        (0.99, 1.0, 0.96, True),  # the newest mean is the threshold
    ],
)
def test_the_threshold(tau: float, ema: float, later: float, merges: bool) -> None:
    """It moves on first, and is compared with then."""
    before = holding(FOUR, [1.0, 2.0, 10.0, 30.0], tau)
    before.keys[0, 3:] = torch.tensor([[0.8, 0.6], [0.6, 0.8]])
    after = merged(D2O(ema=ema), before, [[3]])
    torch.testing.assert_close(after.state.heads[TAU], torch.tensor([later]))
    assert (float(after.values[0, 4, 0]) != 30.0) == merges


def many(seed: int, share: float) -> tuple[Cached, list[list[int]]]:
    """Heads with entries in any slots, some with a threshold, and slots that leave, ascending by position."""
    generator = torch.Generator().manual_seed(seed)
    step = scattered(seed, segments=3, slots=13)
    tau = torch.where(torch.rand(3, generator=generator) < 0.5, torch.rand(3, generator=generator), math.nan)
    cached = dataclasses.replace(step.cached, state=State({MASS_STATE: step.row}, {TAU: tau}))
    return cached, some_slots(step, share, generator)


def by_definition(policy: D2O, cached: Cached, lists: list[list[int]]) -> tuple[Tensor, Tensor, list[float]]:
    """Keys, values and thresholds after the merge, entry by entry."""
    keys, values = cached.keys.double().clone(), cached.values.double().clone()
    taus = cached.state.heads[TAU].tolist()
    for segment, gone in enumerate(lists):
        position = cached.positions[segment].tolist()
        stays = [slot for slot, at in enumerate(position) if at >= 0 and slot not in gone]
        if not gone:
            continue
        units = torch.nn.functional.normalize(cached.keys[segment].double(), dim=-1)
        found = [max((float(units[slot] @ units[to]), -position[to], to) for to in stays) for slot in gone]
        mean = sum(similarity for similarity, _, _ in found) / len(gone)
        before = taus[segment]
        taus[segment] = mean if math.isnan(before) else (1 - policy.ema) * before + policy.ema * mean
        for target in stays:
            mine = [(u, slot) for (u, _, to), slot in zip(found, gone, strict=True) if to == target]
            mine = [(u, slot) for u, slot in mine if u >= taus[segment] - 1e-9]
            if policy.merging == "code":
                own, weights, total = 1.0, [u for u, _ in mine], 1.0 + len(mine)
            else:
                own, weights = math.e, [math.exp(u) for u, _ in mine]
                total = own + sum(weights)
            for states in (values,) if policy.keys_frozen else (keys, values):
                part = sum(w * states[segment, slot] for w, (_, slot) in zip(weights, mine, strict=True))
                states[segment, target] = (own * states[segment, target] + part) / total
    return keys, values, taus


policies = st.builds(
    D2O, merging=st.sampled_from(["paper", "code"]), ema=st.sampled_from([0.3, 0.5, 1.0]), keys_frozen=st.booleans()
)
seeds, shares = st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9])


def check(policy: D2O, before: Cached, lists: list[list[int]], after: Cached) -> None:
    keys, values, taus = by_definition(policy, before, lists)
    torch.testing.assert_close(after.keys, keys.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(after.values, values.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(after.state.heads[TAU], torch.tensor(taus), rtol=1e-5, atol=1e-6, equal_nan=True)


@properties
@given(seeds, shares, policies, st.booleans())
def test_by_definition(seed: int, share: float, policy: D2O, told: bool) -> None:
    """Also where the host knows how many entries stay at most."""
    cached, lists = many(seed, share)
    if told:
        counts = cached.held.sum(-1).tolist()
        cached.most_staying = max(count - len(gone) for count, gone in zip(counts, lists, strict=True))
    if max(map(len, lists)):
        check(policy, cached, lists, merged(policy, cached, lists))
