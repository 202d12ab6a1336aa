"""Ragged eviction equals masking; a budget that evicts nothing changes nothing, nor any budget the prompt's states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvsearch.models.architecture import describe
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram, make_full_program
from tests.families import DEVICES, EACH_FAMILY, build, prompts
from tests.runtime.helpers import (
    Eviction,
    equal_to_masking,
    feed,
    held_tokens,
    kept_tokens,
    one_by_one,
    random_eviction,
    running,
)
from tests.runtime.places import families, places

# of families that also run in the interpreter, for which every layer takes seconds
SHALLOW = {family: {"num_hidden_layers": 2} for family in ("llama", "gemma2")}


@places
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_one_kv_head_and_one_per_query_head(kv_heads: int, device: str) -> None:
    model = build("llama", device, num_hidden_layers=1, num_key_value_heads=kv_heads)
    ids, mask = prompts(2, 40, pads=9, device=device)
    question = prompts(2, 5, pads=2, device=device, seed=2)
    pieces = [(ids, mask), question, *one_by_one(prompts(2, 2, device=device, seed=1)[0])]
    _, cache = equal_to_masking(model, random_eviction(model, mask), pieces)
    assert cache.entries().shape == (1, 2, kv_heads)


@families
@pytest.mark.parametrize("exact", [False, True])
def test_decoding_and_a_padded_second_turn_equal_masking(family: str, exact: bool, device: str) -> None:
    model = build(family, device, **SHALLOW.get(family, {}))
    ids, mask = prompts(2, 30, pads=9, device=device)
    question, question_mask = prompts(2, 7, pads=4, device=device, seed=1)
    more, more_mask = prompts(2, 5, device=device, seed=2)
    answer = one_by_one(prompts(2, 3, device=device, seed=3)[0])
    pieces = [(ids, mask), (question, question_mask), *answer, (more, more_mask), *answer]
    expected, cache = equal_to_masking(model, random_eviction(model, mask, seed=1), pieces, exact=exact)
    full = feed(model, None, pieces)
    assert float((full[2] - expected[2]).abs().max()) > 1e-2  # the test would notice
    assert cache.get_seq_length() == 30 + 7 + 3 + 5 + 3


@families
def test_each_head_holds_what_its_budget_says(family: str, device: str) -> None:
    model = build(family, device, **SHALLOW.get(family, {}))
    ids, mask = prompts(3, 33, pads=12, device=device)
    eviction = random_eviction(model, mask, seed=2)
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, eviction.program)
        feed(model, cache, [(ids, mask)])
        assert list(cache.planned) == list(describe(model).full_layers)
        for row, (layer, chosen) in enumerate(eviction.kept.items()):
            assert held_tokens(cache, layer, 3, 2) == kept_tokens(chosen, mask)
            assert torch.equal(cache.entries()[row], chosen.sum(-1))
        for token in (1, 2):
            seen = torch.cat([mask, mask.new_ones(3, token)], 1)
            model(ids[:, :1], attention_mask=seen, past_key_values=cache)
    for layer, chosen in eviction.kept.items():
        rows = zip(kept_tokens(chosen, mask), mask.sum(-1).tolist(), strict=True)
        grown = [[[*head, length, length + 1] for head in row] for row, length in rows]
        assert held_tokens(cache, layer, 3, 2) == grown


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
def test_left_padding_keeps_the_same_tokens(device: str) -> None:
    """Also where positions are not given, so that the padding shifts them."""
    model = build("qwen3", device, num_hidden_layers=2)
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
        for layer in range(2):
            expected = held_tokens(plain, layer, 1, 2)
            assert held_tokens(positioned, layer, 1, 2) == expected
            if policy != "keydiff":  # its anchor is a mean over rotated keys: absolute positions matter
                assert held_tokens(shifted, layer, 1, 2) == expected


@places
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_empty_budget_is_survived(family: str, device: str) -> None:
    model = build(family, device, num_hidden_layers=2)
    ids, mask = prompts(2, 20, pads=5, device=device)
    nothing = {layer: torch.zeros(2, 2, 20, dtype=torch.bool) for layer in describe(model).full_layers}
    program = Program.uniform(model, create_policy("keydiff"), lambda length: 0)
    question = prompts(2, 4, pads=2, device=device, seed=1)
    pieces = [(ids, mask), question, *one_by_one(prompts(2, 3, device=device, seed=2)[0])]
    _, cache = equal_to_masking(model, Eviction(program, nothing), pieces)
    assert cache.entries().tolist() == [[[5, 5], [7, 7]]] * len(nothing)


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, **kwargs: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **kwargs,
    )  # fmt: skip


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_budgets_are_bit_identical(family: str, dtype: torch.dtype, device: str) -> None:
    model = build(family, device, **SHALLOW.get(family, {})).to(dtype)
    ids, mask = prompts(1, 40, device=device)
    stock = generate(model, ids, mask, DynamicCache(config=model.config))
    with running(model, NAME):
        planned = generate(model, ids, mask, PlanCache(model, make_full_program(model), exact=True))
    assert torch.equal(planned.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(planned.logits, stock.logits, strict=True))


@families
def test_eviction_leaves_the_prompts_hidden_states_alone(family: str, device: str) -> None:
    model = build(family, device, **SHALLOW.get(family, {}))
    ids, mask = prompts(2, 40, pads=7, device=device)
    with torch.no_grad():
        stock = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config),
                      output_hidden_states=True)  # fmt: skip
        with running(model, NAME):
            cache = PlanCache(model, random_eviction(model, mask).program)
            planned = model(ids, attention_mask=mask, past_key_values=cache, output_hidden_states=True)
    assert len(planned.hidden_states) == model.config.num_hidden_layers + 1
    for actual, expected in zip(planned.hidden_states, stock.hidden_states, strict=True):
        assert torch.equal(actual[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_without_a_plan_the_name_is_stock_attention(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 24, pads=5, device=device)
    stock = generate(model, ids, mask, None)
    no_cache = model(ids, attention_mask=mask, use_cache=False).logits
    with running(model, NAME):
        named = generate(model, ids, mask, None)
        assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, no_cache)
    assert torch.equal(named.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(named.logits, stock.logits, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_attach_gives_the_model_back(device: str) -> None:
    model = build("llama", device)
    implementation = model.config._attn_implementation
    planned = attach(model, make_full_program(model))
    with pytest.raises(ZeroDivisionError), planned, attach(model, make_full_program(model)), planned:
        assert model.config._attn_implementation == NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == implementation
