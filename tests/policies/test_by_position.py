"""Policies that rank by position: StreamingLLM, and DuoAttention, whose streaming heads it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsearch.policies.duo_attention import DuoAttention
from kvsearch.policies.streaming import StreamingLLM
from kvsearch.testing.policy_contract import Case, observe
from tests.policies.examples import keep_under, kept, leaves, plain, step_at


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
@pytest.mark.parametrize(
    ("budget", "expected"), [(1, {7}), (2, {0, 7}), (3, {0, 1, 7}), (5, {0, 1, 5, 6, 7}), (7, {0, 1, 3, 4, 5, 6, 7})]
)
def test_sinks_and_recent(policy: StreamingLLM, budget: int, expected: set[int]) -> None:
    assert kept(policy, plain(8), budget) == expected


def test_heads_with_more_than_a_streaming_heads_budget_that_covers_the_prompt_are_never_evicted() -> None:
    policy = DuoAttention(sinks=2, window=3)
    exempt = [policy.keeps_all(budget, length) for budget, length in ((7, 8), (8, 8), (9, 8), (5, 4))]
    assert exempt == [False, True, True, False]  # 5 entries are a streaming head, however short the prompt


@pytest.mark.parametrize("policy", STREAMING)
@pytest.mark.parametrize(
    ("held", "expected"),
    [([6, 0, 5, 1, 7], 5), ([3, 7, 5, 0, 6, 1], 3), ([7, 0, 1], 7), ([1, 0, 7, 2], 2), ([7, 0], 7), ([7], 7)],
)
def test_a_decode_step_drops_the_oldest_entry_behind_the_sinks(
    policy: StreamingLLM, held: list[int], expected: int
) -> None:
    """Token 8 arrives where the prompt left these; below three entries it and sinks stay."""
    assert leaves(policy, step_at([*held, 8]), budget=len(held)) == [expected]


def test_without_sinks_the_oldest_entry_leaves() -> None:
    assert leaves(StreamingLLM(sinks=0), step_at([6, 8, 5, 7]), budget=3) == [5]
