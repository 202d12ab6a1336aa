from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvsearch.policies import rank_entries, scoring
from kvsearch.policies.ranking import merge_ranks
from kvsearch.policies.scoring import average_window_attention, iterate_window_rows, sum_columns
from kvsearch.policies.snapkv import SnapKV
from kvsearch.testing.policy_contract import Case, observe
from tests.combinations import every_value

CASE = Case(heads=6, group=2, length=40, pads=(0, 11), seed=1)
ROW = 8 * 2 * 40  # bytes of logits and attention of a row of one kv head: two query heads, 40 keys


@pytest.mark.parametrize(("scratch", "rows"), [(1, {1}), (2 * ROW, {1, 2}), (10**9, {5})])
def test_scratch_memory_changes_nothing_but_the_steps(
    monkeypatch: pytest.MonkeyPatch, scratch: int, rows: set[int]
) -> None:
    policy = SnapKV(window=5, kernel=3)
    expected = policy.score(observe(policy, CASE))
    monkeypatch.setattr(scoring, "CACHE_BYTES", scratch)
    observation = observe(policy, CASE)
    torch.testing.assert_close(policy.score(observation), expected, rtol=1e-6, atol=0)
    assert {part.shape[-2] for _, part in iterate_window_rows(observation, 5)} == rows


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_scratch_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SnapKV(window=16)
    observation = observe(policy, Case(heads=8, group=4, length=512, pads=(0,), seed=1))
    everything = 8 * 4 * 16 * 512
    monkeypatch.setattr(scoring, "CACHE_BYTES", 8 * everything // 4)
    with Largest() as largest:
        policy.score(observation)
    assert largest.elements == everything // 4
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(1, 4, 2048, 4, generator=generator), torch.randn(1, 2, 2048, 4, generator=generator)
    monkeypatch.undo()
    with Largest() as largest:
        sum_columns(query, keys, torch.ones(1, 2048, dtype=torch.bool), 0.5)
    assert largest.elements * 4 <= scoring.CACHE_BYTES


def test_attention_of_the_window_is_that_of_a_dense_softmax() -> None:
    policy = SnapKV(window=7)
    observation = observe(policy, CASE)
    keys = observation.keys.repeat_interleave(2, 1)
    logits = observation.queries @ keys.transpose(-1, -2) * observation.scaling
    visible = torch.ones(7, 40, dtype=torch.bool).tril(33) & observation.valid[:, None]
    dense = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    parts = torch.cat([probability for _, probability in iterate_window_rows(observation, 7)], 1)
    torch.testing.assert_close(parts.flatten(1, 2), dense)
    torch.testing.assert_close(average_window_attention(observation, 7), dense.mean(2).view(2, 6, 2, 40).mean(2))
    torch.testing.assert_close(average_window_attention(observation, 7, "max"), dense.mean(2).view(2, 6, 2, 40).amax(2))


@every_value(cache=[1, 8 * 2 * 40 * 7, 10**9], rows=[9, 40, 1], softcap=[None, 2.0])
def test_column_sums_are_those_of_a_dense_softmax(
    monkeypatch: pytest.MonkeyPatch, rows: int, softcap: float | None, cache: int
) -> None:
    monkeypatch.setattr(scoring, "CACHE_BYTES", cache)
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 6, rows, 4, generator=generator), torch.randn(2, 3, 40, 4, generator=generator)
    valid = torch.arange(40)[None] >= torch.tensor([[0], [33]])
    for real in (valid, torch.ones_like(valid)):
        logits = query @ keys.repeat_interleave(2, 1).transpose(-1, -2) * 0.7
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        visible = torch.ones(rows, 40, dtype=torch.bool).tril(40 - rows) & real[:, None]
        dense = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        dense = dense.masked_fill(~real[:, None, 40 - rows :, None], 0.0)
        expected = dense.sum(2).view(2, 3, 2, 40).mean(2)
        torch.testing.assert_close(sum_columns(query, keys, real, 0.7, softcap), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("scores", "pads", "ranks"),
    [
        ([9.0, float("-inf"), 1.0], 1, [2, 1, 0]),  # minus infinity is still better than padding
        ([1.0, 1.001, 1.002], 0, [2, 1, 0]),  # which half precision would not tell apart
        ([0.30, 0.30, 0.20, 0.20, 0.20, 0.10], 0, [0, 1, 2, 3, 4, 5]),  # torch.topk may return any of equal ones
    ],
)
def test_ranks(scores: list[float], pads: int, ranks: list[int]) -> None:
    valid = torch.arange(len(scores))[None] >= pads
    assert rank_entries(torch.tensor([[scores]]), valid).tolist() == [[ranks]]


@given(length=st.integers(1, 30), share=st.floats(0, 1), spared=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_two_orders_are_merged_to_what_every_budget_keeps(length: int, share: float, spared: int, seed: int) -> None:
    """Below each budget are its quota of the first order, and the best of the rest by the second."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.stack([torch.randperm(length, generator=generator) for _ in range(3)]) for _ in range(2))
    quota = [int(share * max(0, budget - spared)) for budget in range(length + 1)]
    merged = merge_ranks(first.int(), second.int(), quota)
    for budget in range(length + 1):
        taken = first < quota[budget]
        rest = second.masked_fill(taken, length).argsort(-1).argsort(-1) < budget - quota[budget]
        assert torch.equal(merged < budget, taken | rest)
