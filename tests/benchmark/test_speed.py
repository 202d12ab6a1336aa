"""What bench measures, without a clock: which caches, what they hold, the peak of allocations, ratios within rounds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvsearch.benchmark import speed
from kvsearch.benchmark.cache_costs import Roofline
from kvsearch.benchmark.speed import (
    Workload,
    estimate_prompt_work,
    estimate_token_work,
    list_cache_kinds,
    measure,
    measure_peak_bytes,
    time_decode,
)
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from tests.families import build, prompts, take_families
from tests.runtime.helpers import running

WORK = Workload(batch=2, length=20, steps=3, rounds=2)
MACHINE = Roofline(bandwidth=1e9, flops=1e10)


def snapkv(model: Any, budget: int = 6) -> Program:
    return Program.uniform(model, create_policy("snapkv", {"window": 4}), lambda _: budget)


def measured(family: str = "llama", clock: Any = None) -> dict[str, speed.CacheCosts]:
    model = build(family)
    kinds = list_cache_kinds(model, {"snapkv": snapkv(model)}, WORK.length + WORK.steps)
    found = {one.cache: one for one in measure(model, kinds, WORK, MACHINE)}
    assert model.config._attn_implementation == "sdpa"
    return found


def test_caches_side_by_side() -> None:
    found = measured()
    assert list(found) == ["DynamicCache", "StaticCache", "kvsearch, full", "snapkv"]
    assert [one.entries for one in found.values()] == [20, 20, 20, 6]
    full = 2 * 4 * 2 * 20 * 2 * 16 * 4  # batch, layers, heads, tokens, keys and values
    assert found["DynamicCache"].held_bytes == full
    assert found["StaticCache"].held_bytes == full * 23 // 20 + 4 * 8  # room for the new tokens, and a counter
    assert found["kvsearch, full"].held_bytes == full + full // 32  # an int32 position per entry
    assert found["snapkv"].held_bytes == found["kvsearch, full"].held_bytes * 6 // 20
    assert all(one.peak_bytes > one.held_bytes for one in found.values())
    assert found["DynamicCache"].prefill_speedup == found["DynamicCache"].token_speedup == 1
    assert all(one.tokens_per_second == 2 / one.token_seconds for one in found.values())


def test_ratios_are_medians_within_rounds_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement takes a second more than the one before; kinds take turns at being first."""
    model, ticks = build("llama"), itertools.count(1)
    kinds = list_cache_kinds(model, {}, 30)[:2]
    monkeypatch.setattr(speed, "time_prefill", lambda *_: float(next(ticks)))
    monkeypatch.setattr(speed, "time_decode", lambda *_: float(next(ticks)))
    monkeypatch.setattr(speed, "_measure_peak", lambda *_: 0)
    monkeypatch.setattr(speed, "_measure_held", lambda *_: (0.0, 0))
    dynamic, static = measure(model, kinds, Workload(1, 20, 1, 3), MACHINE)
    # prompts: the warm-up takes 1 and 2; then static 3, dynamic 4; dynamic 5, static 6; static 7, dynamic 8
    assert (dynamic.prefill_seconds, static.prefill_seconds) == (5, 6)
    assert static.prefill_speedup == 8 / 7  # the median of 4/3, 5/6 and 8/7
    assert static.token_speedup == 16 / 15


@take_families("llama", "gemma3", "qwen3_next")
def test_decoding_is_forgotten(family: str) -> None:
    model, (ids, _) = build(family), prompts(1, 20)
    phase = snapkv(model).prefill
    with torch.no_grad(), running(model, NAME):
        for cache in (PlanCache(model, Program(phase)), PlanCache(model, Program(phase, phase))):
            model(ids, past_key_values=cache)
            held = [cache.kept_positions(layer) for layer in cache.planned]
            assert time_decode(model, cache, 1, 4) > 0
            assert cache.get_seq_length() == 20
            assert [cache.kept_positions(layer) for layer in cache.planned] == held
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids, past_key_values=stock).logits
        time_decode(model, stock, 1, 4)
        again = DynamicCache(config=model.config)
        model(ids, past_key_values=again)
        token = expected[:, -1:].argmax(-1)
        assert torch.equal(model(token, past_key_values=stock).logits, model(token, past_key_values=again).logits)


def test_the_peak_is_of_what_is_there_at_a_time() -> None:
    def work() -> None:
        first = torch.zeros(1000)
        first += 1
        del first
        torch.zeros(3000)

    assert 12000 <= measure_peak_bytes(torch.device("cpu"), work) < 13000


def test_what_must_be_read_and_computed() -> None:
    """Weights and cache once; products with every weight, and of a query with the keys and values that it sees."""
    for tied in (True, False):
        model = build("llama", tie_word_embeddings=tied)
        head = 97 * 64
        weights = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else head)
        seen = 4 * 8 * 2 * 2 * 16  # layers, query heads, keys and values, one operation of two of 16 numbers
        assert estimate_token_work(model, 3, 10.0, 5000) == (4 * weights + 5000, 3 * (2 * weights + 10 * seen))
        every = sum(place * seen for place in range(1, 21)) - 10 * seen  # a token sees half of itself
        assert estimate_prompt_work(model, 3, 20) == (4 * weights, 3 * (20 * 2 * (weights - head) + 2 * head + every))


def test_the_floor_is_that_of_what_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Roofline(100.0, 10.0).floor(50, 20) == 2
    assert Roofline(100.0, 10.0).floor(500, 20) == 5
    monkeypatch.setattr(speed, "COPIED_BYTES", 2**12)
    found = speed.measure_roofline(torch.device("cpu"), torch.float32)
    assert found.bandwidth > 0 < found.flops
