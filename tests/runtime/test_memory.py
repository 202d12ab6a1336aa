"""What eviction is for: the bytes are really gone. tests/device/test_memory.py has what a prompt takes at its peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
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
