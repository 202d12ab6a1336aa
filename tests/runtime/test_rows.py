"""Rearranging the sequences of a cache, and taking tokens back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsearch.core.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import make_full_program
from tests.combinations import every_value
from tests.families import DEVICES, build, prompts
from tests.runtime.helpers import assert_close, feed, one_by_one, random_eviction, running

pytestmark = pytest.mark.parametrize("device", DEVICES)

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


@every_value(way=REARRANGED, appended=[0, 3])
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


def test_forgotten_padding_does_not_hide_later_tokens(device: str) -> None:
    """Columns that were padding of a forgotten question are ordinary columns of the next one."""
    model = build("llama", device)
    ids, mask = prompts(2, 30, device=device)
    program = Program.uniform(model, create_policy("streaming"), lambda length: 7)
    padded, pads = prompts(2, 6, pads=5, device=device, seed=1)
    answer = prompts(2, 6, device=device, seed=2)[0]
    with running(model, NAME):
        cache, fresh = (PlanCache(model, program) for _ in range(2))
        feed(model, cache, [(ids, mask), (padded, pads), *one_by_one(answer[:, :1])])
        cache.crop(-7)
        feed(model, fresh, [(ids, mask)])
        lengths = mask.sum(-1)
        for position in range(6):
            token = answer[:, position : position + 1]
            assert_close(step(model, cache, token, lengths), step(model, fresh, token, lengths))
            lengths = lengths + 1


@pytest.mark.parametrize("tokens", [-4, 11])
def test_the_prompt_cannot_be_taken_back(tokens: int, device: str) -> None:
    model = build("gemma3", device)
    ids, mask = prompts(1, 12, device=device)
    with running(model, NAME):
        cache = PlanCache(model, random_eviction(model, mask).program)
        feed(model, cache, [(ids, mask), *one_by_one(ids[:, :3])])
    with pytest.raises(UsageError, match="cannot take back 4 tokens: only 3 came after the prompt"):
        cache.crop(tokens)
    assert {layer.get_seq_length() for layer in cache.layers} == {15}  # refused as a whole


def test_sliding_layers_must_record_what_is_to_be_forgotten(device: str) -> None:
    model = build("gemma2", device)  # a window of 16
    ids, mask = prompts(1, 20, device=device)
    with running(model, NAME):
        cache = PlanCache(model, make_full_program(model))
        feed(model, cache, [(ids, mask), *one_by_one(ids[:, :3])])
    with pytest.raises(UsageError, match=r"layer 0 holds its last 15 tokens only: call activate_past_recording\(\)"):
        cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {23}


@pytest.mark.parametrize("decode", [False, True])
def test_going_back_after_rows_were_added_is_refused(decode: bool, device: str) -> None:
    model = build("llama", device)
    phase = Program.uniform(model, create_policy("h2o"), lambda _: 8).prefill
    cache = PlanCache(model, Program(phase, phase if decode else None))
    with running(model, NAME), torch.no_grad():
        model(prompts(1, 20, device=device)[0], past_key_values=cache)
    mark = cache.mark()
    cache.batch_repeat_interleave(3)
    with pytest.raises(UsageError, match="the mark is of 1 sequences and the cache holds 3 now"):
        cache.rewind(mark)
