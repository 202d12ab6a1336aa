"""The bytes of what is evicted are gone, and masks are looked at once; tests/torture/device has peaks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from tests.families import DEVICES, build, prompts
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
    cast = copy.deepcopy(model).to(dtype)
    with running(cast, NAME):
        cache = PlanCache(cast, eviction.program)
        feed(cast, cache, [(ids, mask)])
    entries = sum(int(kept.sum()) for kept in eviction.kept.values())
    assert int(cache.entries().sum()) == entries
    exact = entries * 2 * DIM * dtype.itemsize
    assert exact < cache.nbytes() <= 1.05 * exact


@torch.no_grad()
def test_query_rows_do_not_hold_the_prompts_queries(model: Any) -> None:
    """A chunked prefill keeps its prompt between chunks: it may hold the window's rows, not the chunk's."""
    ids, _ = prompts(1, 300)
    program = Program.uniform(model, create_policy("snapkv", {"window": 8}), lambda length: 50)
    with running(model, NAME):
        cache = PlanCache(model, program, prompt_length=300)
        model(ids[:, :250], past_key_values=cache)
        for planned in cache.planned.values():
            rows = planned._prompt.rows
            assert rows.untyped_storage().nbytes() == 4 * 8 * DIM * 4
        assert cache.nbytes() == 3 * 2 * 300 * 2 * DIM * 4  # the prompt is not complete: it has all its room
        model(ids[:, 250:], past_key_values=cache)
    assert cache.entries().unique().tolist() == [50]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phases", ["prefill", "both"])
def test_the_mask_of_a_padded_batch_is_looked_at_once_per_step(
    phases: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many layers there are: transformers itself looks at it once in every step, too."""
    model = build("llama", device)
    ids, mask = prompts(2, 20, pads=5, device=device)
    phase = PhaseProgram(dict.fromkeys(range(4), create_policy("tova")), lambda length: np.array([[9, 12]] * 4))
    looks: list[str] = []

    def look(flag: torch.Tensor) -> bool:
        looks.append("bool")
        return bool(flag.tolist())

    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, Program(phase, phase if phases == "both" else None))
        feed(model, cache, [(ids, mask)])
        for step in range(1, 4):
            seen = torch.cat([mask, mask.new_ones(2, step)], 1)
            shown = seen[:, None, None].bool()
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "__bool__", look)
                model(ids[:, :1], attention_mask=shown, position_ids=ids[:, :1], past_key_values=cache)
    assert len(looks) == 3
