from __future__ import annotations

import pytest

from kvsearch.policies.streaming import StreamingLLM
from tests.policies.examples import kept, leaves, plain, step_at


def test_sinks_and_recent() -> None:
    assert kept(StreamingLLM(sinks=2), plain(8), 5) == {0, 1, 5, 6, 7}


@pytest.mark.parametrize(("budget", "expected"), [(1, {7}), (2, {0, 7}), (4, {0, 1, 2, 7}), (5, {0, 1, 2, 6, 7})])
def test_small_budgets_keep_the_newest_and_then_sinks(budget: int, expected: set[int]) -> None:
    assert kept(StreamingLLM(sinks=3), plain(8), budget) == expected


def test_a_decode_step_drops_the_oldest_entry_behind_the_sinks() -> None:
    """After a prompt of 8 with a budget of 5, tokens 0, 1, 5, 6, 7 are held, and 8 arrives."""
    assert leaves(StreamingLLM(sinks=2), step_at([6, 0, 8, 5, 1, 7]), budget=5) == [5]
    assert leaves(StreamingLLM(sinks=0), step_at([6, 8, 5, 7]), budget=3) == [5]


@pytest.mark.parametrize(("budget", "expected"), [(1, 7), (2, 7), (3, 2), (4, 2)])
def test_small_budgets_while_decoding_keep_the_newest_and_then_sinks(budget: int, expected: int) -> None:
    """Token 8 arrives where the prompt left 7 or, with more room, sinks and 7."""
    held = {1: [7], 2: [7, 0], 3: [0, 2, 1], 4: [1, 0, 7, 2]}[budget]
    assert leaves(StreamingLLM(sinks=2), step_at([*held, 8]), budget=budget) == [expected]
