"""What eviction is for: the bytes are really gone, and no second dense layer is ever alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, collector
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.store.storage import RaggedStore
from tests.families import build, prompts
from tests.runtime.helpers import feed, random_eviction, running

LENGTH, DIM = 1100, 64


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", head_dim=DIM, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_after_prefill_are_those_of_the_kept_entries(model: Any, batch: int, dtype: torch.dtype) -> None:
    ids, mask = prompts(batch, LENGTH, pads=100)
    eviction = random_eviction(model, mask)
    model = model.to(dtype)
    try:
        with running(model, NAME):
            cache = PlanCache(model, eviction.program)
            feed(model, cache, [(ids, mask)])
    finally:
        model.to(torch.float32)
    entries = sum(int(kept.sum()) for kept in eviction.kept.values())
    assert int(cache.entries().sum()) == entries
    exact = entries * 2 * DIM * dtype.itemsize
    assert exact < cache.nbytes() <= 1.05 * exact


@torch.no_grad()
def test_growth_is_an_eighth_at_most(model: Any) -> None:
    ids, mask = prompts(1, LENGTH)
    with running(model, NAME):
        cache = PlanCache(model, random_eviction(model, mask).program)
        feed(model, cache, [(ids, mask)])
        before, sizes = cache.nbytes(), set()
        for _ in range(40):
            model(ids[:, :1], past_key_values=cache)
            sizes.add(cache.nbytes())
    entries = int(cache.entries().sum())
    assert max(sizes) <= 1.15 * before + 40 * 6 * (2 * DIM * 4 + 8)
    assert len(sizes) <= 4  # reallocated now and then, not at every token
    assert cache.nbytes() >= entries * 2 * DIM * 4


def dense_keys_alive(model: Any, monkeypatch: pytest.MonkeyPatch, **prefill: Any) -> tuple[list[int], list[Any]]:
    """How many layers' dense keys and values exist at each layer's attention, and what is left afterwards."""
    references: list[Any] = []
    alive: list[int] = []
    inner = collector.dense_attention

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        references.extend([weakref.ref(key), weakref.ref(value)])
        output = inner(module, query, key, value, mask, **kwargs)
        alive.append(sum(reference() is not None for reference in references) // 2)
        return output

    monkeypatch.setattr(collector, "dense_attention", spy)
    gc.disable()  # references must go by themselves
    try:
        with running(model, NAME):
            cache = PlanCache(model, random_eviction(model, prefill["attention_mask"]).program)
            model(past_key_values=cache, **prefill)
    finally:
        gc.enable()
    return alive, [reference for reference in references if reference() is not None]


@torch.no_grad()
def test_one_dense_layer_at_a_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts(2, 200, pads=30)
    alive, left = dense_keys_alive(model, monkeypatch, input_ids=ids, attention_mask=mask)
    assert alive == [1, 1, 1]
    assert left == []


class Allocations(TorchDispatchMode):
    """Remembers the largest tensor that was newly made (views and in-place results are not)."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in inputs:
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


def test_packing_copies_the_kept_entries_only() -> None:
    """Keys as a model hands them over, [B, T, Hkv, D] transposed, must not be made contiguous first."""
    keys = torch.randn(4, 512, 2, DIM).transpose(1, 2)
    values = torch.randn(4, 512, 2, DIM).transpose(1, 2)
    keep = torch.rand(4, 2, 512) < 0.1
    with Allocations() as allocations:
        RaggedStore.pack(keys, values, keep, torch.arange(512).expand(4, -1))
    assert allocations.largest < keys.numel() * 4 / 4


@torch.no_grad()
def test_query_rows_do_not_hold_the_prompts_queries(model: Any) -> None:
    """A chunked prefill keeps the collector between chunks: it may hold the window's rows, not the chunk's."""
    ids, _ = prompts(1, 300)
    program = Program.uniform(model, create_policy("snapkv", {"window": 8}), lambda length: 50)
    with running(model, NAME):
        cache = PlanCache(model, program, prompt_length=300)
        model(ids[:, :250], past_key_values=cache)
        for planned in cache.planned.values():
            rows = planned._prompt.collector.rows
            assert rows is not None
            assert rows.untyped_storage().nbytes() == 4 * 8 * DIM * 4
        assert cache.nbytes() == 3 * 2 * 250 * 2 * DIM * 4  # the prompt is not complete: nothing is evicted
        model(ids[:, 250:], past_key_values=cache)
    assert cache.entries().unique().tolist() == [50]
