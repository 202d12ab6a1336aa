"""Ragged eviction equals masking the evicted keys, whatever comes after the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.models.architecture import describe
from kvsearch.plan import budgets_at
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from tests.families import build, prompts
from tests.runtime.helpers import (
    Eviction,
    assert_close,
    feed,
    held_tokens,
    kept_tokens,
    one_by_one,
    plan_for,
    planned_and_reference,
    random_eviction,
    running,
)
from tests.runtime.places import families, places


@families
@pytest.mark.parametrize("exact", [False, True])
def test_decoding_equals_masking(family: str, exact: bool, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 40, pads=9, device=device)
    eviction = random_eviction(model, mask)
    pieces = [(ids, mask), *one_by_one(prompts(2, 8, device=device, seed=1)[0])]
    planned, expected, cache = planned_and_reference(model, eviction, pieces, exact=exact)
    for actual, wanted in zip(planned[1:], expected[1:], strict=True):
        assert_close(actual, wanted)
    evicts_nothing = feed(model, None, [(torch.cat([ids, pieces[1][0]], 1), torch.cat([mask, pieces[1][1]], 1))])
    assert float((evicts_nothing[0][:, -1:] - expected[1]).abs().max()) > 1e-2  # the test would notice
    assert cache.get_seq_length() == 48


@places
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_one_kv_head_and_one_per_query_head(kv_heads: int, device: str) -> None:
    model = build("llama", device, num_key_value_heads=kv_heads)
    ids, mask = prompts(2, 40, pads=9, device=device)
    question = prompts(2, 5, pads=2, device=device, seed=2)
    pieces = [(ids, mask), question, *one_by_one(prompts(2, 4, device=device, seed=1)[0])]
    planned, expected, cache = planned_and_reference(model, random_eviction(model, mask), pieces)
    for (_, real), actual, wanted in list(zip(pieces, planned, expected, strict=True))[1:]:
        assert_close(actual[real.bool()], wanted[real.bool()])
    assert cache.entries().shape == (4, 2, kv_heads)


@families
def test_a_padded_second_turn_equals_masking(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, pads=9, device=device)
    question, question_mask = prompts(2, 7, pads=4, device=device, seed=1)
    more, more_mask = prompts(2, 5, device=device, seed=2)
    answer = one_by_one(prompts(2, 3, device=device, seed=3)[0])
    pieces = [(ids, mask), (question, question_mask), *answer, (more, more_mask), *answer]
    planned, expected, _ = planned_and_reference(model, random_eviction(model, mask, seed=1), pieces)
    for (_, real), actual, wanted in list(zip(pieces, planned, expected, strict=True))[1:]:
        assert_close(actual[real.bool()], wanted[real.bool()])


@families
def test_each_head_holds_what_its_budget_says(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(3, 33, pads=12, device=device)
    eviction = random_eviction(model, mask, seed=2)
    with running(model, NAME):
        cache = PlanCache(model, eviction.program)
        feed(model, cache, [(ids, mask)])
        assert list(cache.planned) == list(describe(model).full_layers)
        for row, (layer, chosen) in enumerate(eviction.kept.items()):
            assert held_tokens(cache, layer, 3, 2) == kept_tokens(chosen, mask)
            assert torch.equal(cache.entries()[row], chosen.sum(-1))
        feed(model, cache, one_by_one(ids[:, :2]))
    for layer, chosen in eviction.kept.items():
        rows = zip(kept_tokens(chosen, mask), mask.sum(-1).tolist(), strict=True)
        grown = [[[*head, length, length + 1] for head in row] for row, length in rows]
        assert held_tokens(cache, layer, 3, 2) == grown


@pytest.mark.parametrize("policy", ["full", "streaming", "snapkv", "keydiff", "expected_attention"])
@families
def test_every_policy_fills_its_budget(family: str, policy: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, pads=20, device=device)
    program = Program.uniform(model, create_policy(policy), lambda length: max(1, length // 2))
    with running(model, NAME):
        cache = PlanCache(model, program)
        (logits,) = feed(model, cache, [(ids, mask)])
    expected = [[10, 10], [30, 30]] if policy == "full" else [[5, 5], [15, 15]]
    assert cache.entries().tolist() == [expected] * len(cache.planned)
    assert logits.isfinite().all()
    for layer in cache.planned:
        assert 29 in cache.kept_positions(layer, 1, 0) or policy in ("keydiff", "expected_attention")
        assert max(cache.kept_positions(layer, 0, 1)) < 10


@places
@pytest.mark.parametrize("policy", ["full", "streaming", "snapkv", "keydiff", "expected_attention"])
def test_prompts_of_one_token(policy: str, device: str) -> None:
    model = build("qwen3", device)
    ids, mask = prompts(2, 1, device=device)
    program = Program.uniform(model, create_policy(policy), lambda length: 1)
    pieces = [(ids, mask), *one_by_one(prompts(2, 4, device=device, seed=1)[0])]
    with running(model, NAME):
        planned = feed(model, PlanCache(model, program), pieces)
    stock = feed(
        model, None, [(torch.cat([piece for piece, _ in pieces], 1), torch.ones(2, 5, dtype=torch.long, device=device))]
    )
    assert_close(torch.cat(planned, 1), stock[0])


@places
def test_layers_without_a_plan_keep_their_cache(device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(2, 30, pads=5, device=device)
    eviction = random_eviction(model, mask, layers=[1, 3])
    pieces = [(ids, mask), *one_by_one(prompts(2, 4, device=device, seed=1)[0])]
    planned, expected, cache = planned_and_reference(model, eviction, pieces)
    for actual, wanted in zip(planned[1:], expected[1:], strict=True):
        assert_close(actual, wanted)
    assert list(cache.planned) == [1, 3]
    assert cache.layers[0].keys.shape[2] == 34


@places
def test_budgets_follow_each_sequences_own_length(device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(2, 40, pads=24, device=device)
    asked: list[int] = []

    def table(length: int) -> np.ndarray:
        asked.append(length)
        return np.full((4, 2), length // 4)

    program = Program(PhaseProgram(dict.fromkeys(range(4), create_policy("streaming")), table))
    with running(model, NAME):
        cache = PlanCache(model, program)
        feed(model, cache, [(ids, mask)])
    assert cache.entries().tolist() == [[[4, 4], [10, 10]]] * 4
    assert sorted(asked) == [16, 40]  # once per length, not per layer
    assert cache.kept_positions(0, 0, 0) == [0, 1, 2, 15]


@places
def test_a_proportional_plan_scales_with_each_sequence(device: str) -> None:
    model = build("llama", device)
    plan = plan_for(model, [[10, 20], None, [5, 40], [30, 15]], scaling="proportional", length=80, floor=5)
    ids, mask = prompts(2, 40, pads=24, device=device)
    with running(model, NAME):
        cache = PlanCache(model, plan)
        feed(model, cache, [(ids, mask)])
    for row, length in enumerate((16, 40)):
        assert cache.entries()[:, row].tolist() == budgets_at(plan, "prefill", length).tolist()


@places
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@torch.no_grad()
def test_masks_of_four_dimensions(family: str, dtype: torch.dtype, device: str) -> None:
    """Masks that a caller made: their last row says which keys are padding."""
    model = build(family, device, layer_types=["full_attention"] * 4)
    ids, mask = prompts(2, 30, pads=9, device=device)
    square = mask.bool()[:, None, None] & torch.ones(30, 30, dtype=torch.bool, device=device).tril()
    if dtype != torch.bool:
        square = torch.zeros_like(square, dtype=dtype).masked_fill_(~square, torch.finfo(dtype).min)
    program = Program.uniform(model, create_policy("snapkv", {"window": 3}), lambda length: length // 3)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with running(model, NAME):
        flat, given = PlanCache(model, program), PlanCache(model, program)
        (expected,) = feed(model, flat, [(ids, mask)])
        logits = model(ids, attention_mask=square, position_ids=positions, past_key_values=given).logits
    assert_close(logits[mask.bool()], expected[mask.bool()])
    for layer in given.planned:
        assert held_tokens(given, layer, 2, 2) == held_tokens(flat, layer, 2, 2)


@places
def test_left_padding_keeps_the_same_tokens(device: str) -> None:
    """Also where positions are not given, so that the padding shifts them."""
    model = build("qwen3", device)
    ids, mask = prompts(1, 30, device=device)
    padded = torch.cat([torch.zeros_like(ids[:, :6]), ids], 1)
    longer = torch.cat([torch.zeros_like(mask[:, :6]), mask], 1)
    for policy in ("streaming", "snapkv", "keydiff", "expected_attention"):
        program = Program.uniform(model, create_policy(policy), lambda length: length // 3)
        with running(model, NAME), torch.no_grad():
            plain, positioned, shifted = (PlanCache(model, program) for _ in range(3))
            model(ids, past_key_values=plain)
            feed(model, positioned, [(padded, longer)])
            model(padded, attention_mask=longer, past_key_values=shifted)
        for layer in range(4):
            for head in range(2):
                expected = plain.kept_positions(layer, 0, head)
                assert positioned.kept_positions(layer, 0, head) == expected
                if policy != "keydiff":  # its anchor is a mean over rotated keys: absolute positions matter
                    assert shifted.kept_positions(layer, 0, head) == expected


@places
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_empty_budget_is_survived(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 20, pads=5, device=device)
    nothing = {layer: torch.zeros(2, 2, 20, dtype=torch.bool) for layer in describe(model).full_layers}
    program = Program.uniform(model, create_policy("keydiff"), lambda length: 0)
    question = prompts(2, 4, pads=2, device=device, seed=1)
    pieces = [(ids, mask), question, *one_by_one(prompts(2, 3, device=device, seed=2)[0])]
    planned, expected, cache = planned_and_reference(model, Eviction(program, nothing), pieces)
    for (_, real), actual, wanted in list(zip(pieces, planned, expected, strict=True))[1:]:
        assert_close(actual[real.bool()], wanted[real.bool()])
    assert cache.entries().tolist() == [[[5, 5], [7, 7]]] * len(nothing)


@places
def test_two_caches_of_one_model_do_not_disturb_each_other(device: str) -> None:
    model = build("llama", device)
    prompt: list[Any] = [prompts(2, 30, pads=pads, device=device, seed=pads) for pads in (3, 8)]
    evictions = [random_eviction(model, mask, seed=i) for i, (_, mask) in enumerate(prompt)]
    answer = prompts(2, 5, device=device, seed=9)[0]
    alone = [
        planned_and_reference(model, eviction, [piece, *one_by_one(answer)])[0]
        for eviction, piece in zip(evictions, prompt, strict=True)
    ]
    with running(model, NAME), torch.no_grad():
        caches = [PlanCache(model, eviction.program) for eviction in evictions]
        seen = [mask for _, mask in prompt]
        for step in range(6):
            for which in (0, 1):
                ids = prompt[which][0] if step == 0 else answer[:, step - 1 : step]
                if step:
                    seen[which] = torch.cat([seen[which], torch.ones_like(ids)], 1)
                positions = (seen[which].cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                logits = model(
                    ids, attention_mask=seen[which], position_ids=positions, past_key_values=caches[which]
                ).logits
                assert torch.equal(logits, alone[which][step])
