from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvsearch.policies import scoring
from kvsearch.policies.cake import CAKE, compute_row_moments
from kvsearch.policies.scoring import iterate_window_rows
from kvsearch.testing.policy_contract import Case, observe
from tests.policies.examples import attending, check_order_of_slots, kept, leaves, step_at

# three candidates, then the window's own two columns
ROWS = [[0.4, 0.1, 0.3, 0.2, 0.0], [0.4, 0.3, 0.3, 0.0, 0.0]]
CASE = Case(heads=3, group=2, length=30, pads=(0, 4), seed=6)


@pytest.mark.parametrize(
    ("gamma", "scores", "expected"), [(200.0, [0.4, 4.2, 0.3], {1, 3, 4}), (0.0, [0.4, 0.2, 0.3], {0, 3, 4})]
)
def test_mean_plus_unbiased_variance(gamma: float, scores: list[float], expected: set[int]) -> None:
    policy = CAKE(window=2, kernel=1, gamma=gamma)
    torch.testing.assert_close(policy.score(attending(ROWS))[0, 0, :3], torch.tensor(scores), atol=1e-4, rtol=0)
    assert kept(policy, attending(ROWS), 3) == expected
    if gamma:  # candidates are pooled without the window
        pooled = CAKE(window=2, kernel=3, gamma=gamma).score(attending(ROWS))[0, 0, :3]
        wanted = torch.tensor([(0.4 + 4.2) / 3, (0.4 + 4.2 + 0.3) / 3, (4.2 + 0.3) / 3])
        torch.testing.assert_close(pooled, wanted, atol=1e-4, rtol=0)


def test_the_variance_is_that_of_each_query_head() -> None:
    """Two heads that swap their rows: their mean does not vary, they do."""
    scores = CAKE(window=2, kernel=1, gamma=1.0).score(attending(ROWS, ROWS[::-1]))[0, 0, :3]
    torch.testing.assert_close(scores, torch.tensor([0.4, 0.22, 0.3]))


def reference(window: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance [..., T] of rows [..., w, T]."""
    rows = window.double()
    return rows.mean(-2).float(), rows.var(-2).float()


@pytest.mark.parametrize("scratch", [1, 2500, 10**9])
def test_moments_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    """One row at a time, several at once, and all."""
    observation = observe(CAKE(window=7), CASE)
    mean, variance = reference(torch.cat([rows for _, rows in iterate_window_rows(observation, 7)], 1))
    monkeypatch.setattr(scoring, "CACHE_BYTES", scratch)
    chunks = {rows.shape[-2] for _, rows in iterate_window_rows(observation, 7)}
    assert chunks == {1: {1}, 2500: {5, 2}}.get(scratch, {7})
    found = compute_row_moments(observation, 7)
    torch.testing.assert_close(found[0], mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[1], variance, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("scratch", [1, 10**9])
def test_a_small_variance_next_to_a_large_mean_is_accurate(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    """One entry has nearly all attention in every row: squares of the mean would drown the variance in rounding."""
    logits = torch.zeros(1, 1, 16, 20)
    logits[..., 0] = 12.0 + torch.linspace(-0.01, 0.01, 16)
    observation = dataclasses.replace(attending([[0.05] * 20] * 16), queries=logits)
    _, variance = reference(torch.cat([rows for _, rows in iterate_window_rows(observation, 16)], 1))
    assert 0 < float(variance[0, 0, 0, 0]) < 1e-9
    monkeypatch.setattr(scoring, "CACHE_BYTES", scratch)
    found = compute_row_moments(observation, 16)
    torch.testing.assert_close(found[1][..., 0], variance[..., 0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("scratch", [1, 10**9])
def test_rows_of_padding_do_not_count(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    """A prompt of three tokens behind two of padding, in a window of five rows: three rows are real."""
    row = [0.0, 0.0, 0.2, 0.3, 0.5]
    observation = dataclasses.replace(attending([row] * 5), valid=torch.tensor([[False, False, True, True, True]]))
    real = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.2, 0.3, 0.5]])  # each sees what precedes it
    monkeypatch.setattr(scoring, "CACHE_BYTES", scratch)
    mean, variance = compute_row_moments(observation, 5)
    torch.testing.assert_close(mean[0, 0, 0, 2:], real.mean(0))
    torch.testing.assert_close(variance[0, 0, 0, 2:], real.var(0))


def test_a_decode_step_pools_its_row_over_the_order_of_positions() -> None:
    """Tokens 0, 2, 5, 6 behind a window of 8 and 9, with attention .30, .03, .06, .24.

    Averages of three with zeros at the ends: .11, .13, .11, .10; so 6 leaves, which has no low attention itself.
    """
    positions, row = [9, 0, -1, 5, 8, 2, 6], [0.2, 0.3, 0.0, 0.06, 0.17, 0.03, 0.24]
    step = step_at(positions, row)
    priorities = CAKE(window=2, kernel=3).step(step)[0]
    torch.testing.assert_close(priorities[[1, 5, 3, 6]], torch.tensor([0.11, 0.13, 0.11, 0.10]))
    check_order_of_slots(CAKE(window=2, kernel=3), step, 0)
    assert leaves(CAKE(window=2, kernel=3), step, budget=5) == [6]
    assert leaves(CAKE(window=2, kernel=1), step, budget=5) == [2]
    assert leaves(CAKE(window=2, kernel=3, pooling="none", sinks=2), step, budget=5) == [2]
