"""Attention that adds up, as H2O ranks by, and that of the last row alone, as TOVA does."""

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
from kvsearch.policies.tova import TOVA
from kvsearch.testing.policy_contract import Case, cases, observe, properties
from tests.policies.examples import attending, kept, leaves, step_at

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
        (H2O(recent=1), 3, {0, 2, 4}),
        (H2O(), 4, {0, 2, 3, 4}),
        (H2O(), 3, {0, 3, 4}),  # of an odd budget, the odd entry is recent
        (H2O(), 2, {0, 4}),
        (H2O(), 1, {4}),
        (H2O(recent_share=0.0), 3, {0, 2, 4}),  # the newest entry always stays
        (H2O(recent_share=1.0), 3, {2, 3, 4}),
        (H2O(recent_share=0.25), 4, {0, 1, 2, 4}),
        (H2O(sinks=2), 4, {0, 1, 3, 4}),
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
    only_recent = arriving([5, 0, 4, 3, 2], [0.0, 2.8, 0.3, 0.7, 0.8], [0.4, 0.2, 0.2, 0.1, 0.1])
    assert leaves(H2O(recent_share=1.0), only_recent, budget=4) == [0]


def arriving(positions: list[int], mass: list[float], row: list[float]) -> Step:
    step = step_at(positions, row)
    return dataclasses.replace(
        step, cached=dataclasses.replace(step.cached, state=State({MASS_STATE: torch.tensor([mass])}))
    )


@properties
@given(cases(), st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.integers(0, 3), st.integers(1, 15))
def test_kept_sets_by_definition(case: Case, share: float, sinks: int, budget: int) -> None:
    """Sinks, the last r(b) entries, and of the others those that received most."""
    policy = H2O(recent_share=share, sinks=sinks)
    observation = observe(policy, case)
    recent = max(1, -int(-budget * share // 1))
    if budget < sinks + recent:
        return
    for head in range(case.heads):
        mass = observation.received()[0, head, case.pads[0] :].tolist()
        count = len(mass)
        chosen = {*range(min(sinks, count)), *range(max(0, count - recent), count)}
        others = sorted(set(range(count)) - chosen, key=lambda index: (-mass[index], index))
        expected = chosen | set(others[: max(0, budget - len(chosen))])
        assert kept(policy, observation, budget, head) == {index + case.pads[0] for index in expected}


HEADS = ([[0.5, 0.1, 0.05, 0.05, 0.3]], [[0.1, 0.1, 0.35, 0.05, 0.4]])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_mean_over_all_heads_of_the_layer_ranks_for_every_head(kv_heads: int) -> None:
    """Two query heads, of one kv head or of two."""
    observation = attending(*HEADS, kv_heads=kv_heads)
    expected = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.35]).expand(1, kv_heads, 5)
    torch.testing.assert_close(TOVA().score(observation), expected)
    assert all(kept(TOVA(), observation, 3, head) == {0, 2, 4} for head in range(kv_heads))


def test_the_newest_and_the_first_token_may_go_unless_they_are_protected() -> None:
    observation = attending([[0.1, 0.5, 0.3, 0.1, 0.0]])
    assert kept(TOVA(), observation, 2) == {1, 2}
    assert kept(TOVA(protect_last=True), observation, 2) == {1, 4}
    assert kept(TOVA(protect_last=True, sinks=1), observation, 2) == {0, 4}


def test_a_decode_step_drops_the_lowest_of_its_own_row() -> None:
    """Tokens 0, 2, 4 and the new 5, with mean attention .1, .4, .3, .2: 0 leaves."""
    step = step_at([4, 0, 5, 2], row=[0.3, 0.1, 0.2, 0.4])
    assert leaves(TOVA(), step, budget=3) == [0]
    assert leaves(TOVA(sinks=1), step, budget=3) == [5]
    assert leaves(TOVA(sinks=1, protect_last=True), step, budget=3) == [4]
    assert (TOVA().row, TOVA().has_decode_rule) == ("layer", True)
