from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvsearch.policies import scoring
from kvsearch.policies.scoring import mean_window_attention, window_rows
from kvsearch.policies.snapkv import SnapKV

from .contract import Case, observe

CASE = Case(heads=6, group=2, length=40, pads=(0, 11), seed=1)


@pytest.mark.parametrize("scratch", [1, 3 * 8 * 2 * 2 * 5 * 40, 10**9])
def test_scratch_memory_changes_nothing_but_the_steps(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    policy = SnapKV(window=5, kernel=3)
    observation = observe(policy, CASE)
    expected = policy.score(observation)
    monkeypatch.setattr(scoring, "SCRATCH_BYTES", scratch)
    torch.testing.assert_close(policy.score(observation), expected, rtol=1e-6, atol=0)
    steps = [part.indices(6) for part, _ in window_rows(observation, 5)]
    width = {1: 1, 10**9: 6}.get(scratch, 3)
    assert [(start, stop) for start, stop, _ in steps] == [(i, min(i + width, 6)) for i in range(0, 6, width)]


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
    monkeypatch.setattr(scoring, "SCRATCH_BYTES", 8 * everything // 4)
    with Largest() as largest:
        policy.score(observation)
    assert largest.elements == everything // 4


def test_attention_of_the_window_is_that_of_a_dense_softmax() -> None:
    policy = SnapKV(window=7)
    observation = observe(policy, CASE)
    assert observation.queries is not None
    keys = observation.keys.repeat_interleave(2, 1)
    logits = observation.queries @ keys.transpose(-1, -2) * observation.scaling
    visible = torch.ones(7, 40, dtype=torch.bool).tril(33) & observation.valid[:, None]
    dense = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    parts = torch.cat([probability for _, probability in window_rows(observation, 7)], 1)
    torch.testing.assert_close(parts.flatten(1, 2), dense)
    torch.testing.assert_close(mean_window_attention(observation, 7), dense.mean(2).view(2, 6, 2, 40).mean(2))
    torch.testing.assert_close(mean_window_attention(observation, 7, "max"), dense.mean(2).view(2, 6, 2, 40).amax(2))


def test_soft_capped_logits() -> None:
    import dataclasses

    observation = observe(SnapKV(window=2), Case(heads=1, group=1, length=3, pads=(0,), seed=4))
    assert observation.queries is not None
    capped = dataclasses.replace(observation, softcap=0.5)
    logits = 0.5 * torch.tanh(observation.queries @ observation.keys.transpose(-1, -2) * 0.5 / 0.5)
    expected = logits[0, 0, 1].softmax(-1)
    ((_, probability),) = window_rows(capped, 2)
    torch.testing.assert_close(probability[0, 0, 0, 1], expected)
