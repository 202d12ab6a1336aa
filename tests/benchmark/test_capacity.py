"""The largest batch: equal sequences, a smaller one where memory runs out; what a GPU's calls say of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.benchmark import capacity
from kvsearch.benchmark.speed import (
    CacheKind,
    Workload,
    draw_prompts,
    list_cache_kinds,
    make_program,
    make_skewed_budgets,
    time_prefill,
)
from kvsearch.plan import Phase
from kvsearch.plan.size import Size
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache
from tests.families import build

WORK = Workload(batch=1, length=20, steps=3, rounds=1)


def kinds_of(model: Any, phases: tuple[Phase, ...] = ("prefill",)) -> list[CacheKind]:
    program = make_program(model, create_policy("snapkv", {"window": 4}), Size(6), phases)
    return list_cache_kinds(model, {"snapkv": program}, WORK.length + WORK.steps + capacity.PROBE_STEPS)


@pytest.mark.parametrize("phases", [("prefill",), ("prefill", "decode")])
@torch.no_grad()
def test_every_sequence_is_the_one_that_was_read(phases: tuple[Phase, ...]) -> None:
    model = build("llama")
    for kind in kinds_of(model, phases):
        model.set_attn_implementation(kind.implementation)
        one = kind.make()
        time_prefill(model, one, draw_prompts(model, 1, WORK.length))
        many = capacity._repeat_cache(kind, one, 3)
        assert many.get_seq_length() == one.get_seq_length() == WORK.length
        if isinstance(one, PlanCache):
            assert torch.equal(many.entries(), one.entries().expand(-1, 3, -1))
        token = torch.ones(3, 1, dtype=torch.long)
        logits = model(token, past_key_values=many).logits
        alone = model(token[:1], past_key_values=one).logits
        torch.testing.assert_close(logits, alone.expand_as(logits), atol=1e-5, rtol=0)


def test_fewer_sequences_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = build("llama"), list[int]()

    def repeated(kind: CacheKind, one: Any, batch: int) -> None:
        tried.append(batch)
        if batch > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capacity, "_repeat_cache", repeated)
    monkeypatch.setattr(capacity, "time_steps", lambda *_: 2.0)
    monkeypatch.setattr(capacity, "measure_peak_bytes", lambda *_: 0)
    kind = kinds_of(model)[0]
    one = 4 * 2 * 20 * 2 * 16 * 4  # layers, heads, tokens, keys and values: the bytes of a sequence
    found = capacity.find_largest_batch(model, kind, WORK, 34 * one + 5)
    assert tried == [34, 32, 30]
    assert found == (30, 30 * 3 / 2)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 3000))
def test_skewed_budgets_have_their_mean(layers: int, heads: int, mean: int) -> None:
    budgets = make_skewed_budgets(layers, heads, mean)
    assert np.array_equal(budgets.sum(1), np.full(layers, mean * heads))
    assert budgets.min() >= 1
    assert np.array_equal(budgets, make_skewed_budgets(layers, heads, mean))
