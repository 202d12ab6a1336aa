"""What code written for stock caches asks: keys, values, attention weights, other rows, tokens taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvsearch import attach
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME, use_attention
from kvsearch.runtime.program import make_full_program
from tests.combinations import in_turn
from tests.families import DEVICES, build, prompts
from tests.runtime.helpers import assert_close, feed, one_by_one, random_eviction, running

LENGTH = 20


@pytest.fixture
def model() -> Any:
    return build("llama")


def eight(model: Any) -> Program:
    return Program.uniform(model, create_policy("snapkv", {"window": 2}), lambda _: 8)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_keys_and_values_are_those_of_a_stock_cache_where_nothing_is_evicted(model: Any, kind: str) -> None:
    ids, _ = prompts(2, LENGTH)
    program = make_full_program(model)
    if kind == "decode":
        program = Program.of_policy(model, create_policy("tova"), {"decode": lambda _: np.full((4, 2), 100)})
    stock, cache = DynamicCache(config=model.config), PlanCache(model, program)
    assert cache.layers[0].keys is None
    assert cache.layers[0].values is None
    for piece in (ids[:, :15], ids[:, 15:16], ids[:, 16:]):
        model.set_attn_implementation("sdpa")
        model(piece, past_key_values=stock)
        with use_attention(model, NAME):
            model(piece, past_key_values=cache)
        for mine, theirs in zip(cache.layers, stock.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=2e-5, rtol=1e-4)


def test_keys_of_which_some_are_gone_are_no_tensor(model: Any) -> None:
    ids, mask = prompts(2, LENGTH, pads=3)
    with use_attention(model, NAME):
        cache = PlanCache(model, eight(model))
        model(ids, attention_mask=mask, past_key_values=cache)
        for name in ("keys", "values"):
            with pytest.raises(UsageError, match=r"layer 1 .* of 20 tokens its heads hold 8 to 8 entries"):
                getattr(cache.layers[1], name)


def test_attention_weights_are_empty_and_that_is_said(model: Any) -> None:
    ids, _ = prompts(1, LENGTH)
    asked: dict[str, Any] = {"max_new_tokens": 3, "output_attentions": True, "return_dict_in_generate": True}
    with attach(model, eight(model)) as planned:
        with pytest.warns(KvsearchWarning, match="attention under a plan gives no weights"):
            found = planned.generate(ids, **asked)
        assert found.attentions == ((), (), ())
        with pytest.warns(KvsearchWarning, match="gives no weights"):
            model(ids, past_key_values=planned.new_cache(), output_attentions=True)
        assert planned.generate(ids, max_new_tokens=3).tolist() == found.sequences.tolist()
        with pytest.raises(UsageError, match="drop output_attentions"):
            planned.generate(ids, prompt_lookup_num_tokens=2, **asked)


# what is called, with which tensor or number, and which sequences that leaves
REARRANGED: dict[str, tuple[str, Any, list[int]]] = {
    "reorder": ("reorder_cache", [2, 0, 0], [2, 0, 0]),
    "select": ("batch_select_indices", [1], [1]),
    "select by mask": ("batch_select_indices", [True, False, True], [0, 2]),
    "select backwards": ("batch_select_indices", [-1, 1], [2, 1]),
    "repeat": ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
}


def rearrange(way: str, cache: PlanCache, device: str) -> list[int]:
    method, argument, rows = REARRANGED[way]
    getattr(cache, method)(torch.tensor(argument, device=device) if isinstance(argument, list) else argument)
    return rows


@torch.no_grad()
def step(model: Any, cache: PlanCache, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Logits of one decode step, [B, V]; the length of a sequence is its new token's position, the rest is padding."""
    columns = torch.arange(cache.get_seq_length(), -1, -1, device=ids.device)
    mask = (columns <= lengths[:, None]).long()
    output = model(input_ids=ids, attention_mask=mask, position_ids=lengths[:, None], past_key_values=cache)
    logits: torch.Tensor = output.logits[:, -1]
    return logits


@pytest.mark.parametrize("device", DEVICES)
@in_turn(way=REARRANGED, appended=[3, 0])
def test_rearranged_sequences_go_on_as_they_were(way: str, appended: int, device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(3, 30, pads=8, device=device)
    eviction, answer = random_eviction(model, mask), prompts(3, 5, device=device, seed=1)[0]
    with running(model, NAME):
        straight, moved = (PlanCache(model, eviction.program) for _ in range(2))
        for cache in (straight, moved):
            feed(model, cache, [(ids, mask), *one_by_one(answer[:, :appended])])
        rows = rearrange(way, moved, device)
        assert torch.equal(moved.entries(), straight.entries()[:, rows])
        for new, old in enumerate(rows):
            assert moved.kept_positions(1, new, 1) == straight.kept_positions(1, old, 1)
        lengths = mask.sum(-1) + appended
        for position in range(appended, 5):
            token = answer[:, position : position + 1]
            expected = step(model, straight, token, lengths)
            assert_close(step(model, moved, token[rows], lengths[rows]), expected[rows])
            lengths = lengths + 1
        assert moved.get_seq_length() == straight.get_seq_length()
    moved.crop(-5)  # what came before the move can still be taken back
    assert torch.equal(moved.entries(), straight.entries()[:, rows] - 5)


@pytest.mark.parametrize("device", DEVICES)
def test_crop_takes_back_what_came_after_the_prompt(device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(2, 30, pads=8, device=device)
    eviction, answer = random_eviction(model, mask), prompts(2, 6, device=device, seed=1)[0]
    with running(model, NAME):
        cache, short = (PlanCache(model, eviction.program) for _ in range(2))
        feed(model, cache, [(ids, mask), *one_by_one(answer)])
        feed(model, short, [(ids, mask), *one_by_one(answer[:, :2])])
        cache.crop(torch.tensor(-3))  # a tensor, as assisted decoding passes
        cache.crop(33)  # the length to keep, as before transformers 5.23
        cache.crop(100)
        cache.crop(0)
        assert cache.get_seq_length() == 33
        cache.crop(-1)
        assert cache.get_seq_length() == 32
        assert torch.equal(cache.entries(), short.entries())
        lengths = mask.sum(-1) + 2
        assert torch.equal(step(model, cache, answer[:, 5:], lengths), step(model, short, answer[:, 5:], lengths))


@pytest.mark.parametrize("device", DEVICES)
def test_the_prompt_cannot_be_taken_back(device: str) -> None:
    model = build("gemma3", device)
    ids, mask = prompts(1, 12, device=device)
    with running(model, NAME):
        cache = PlanCache(model, random_eviction(model, mask).program)
        feed(model, cache, [(ids, mask), *one_by_one(ids[:, :3])])
    with pytest.raises(UsageError, match="cannot take back 4 tokens: only 3 came after the prompt"):
        cache.crop(-4)
    assert {layer.get_seq_length() for layer in cache.layers} == {15}  # refused as a whole
