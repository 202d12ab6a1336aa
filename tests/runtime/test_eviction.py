"""Ragged eviction equals masking, in prompts and while decoding; nothing else changes, and what is evicted is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvsearch.models.architecture import describe
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram, make_full_program
from tests.families import DEVICES, EACH_FAMILY, build, prompts
from tests.runtime.helpers import (
    assert_close,
    columns,
    equal_to_masking,
    feed,
    held_tokens,
    hide,
    kept_tokens,
    one_by_one,
    plan_for,
    random_eviction,
    reference,
    running,
)
from tests.runtime.places import families, places

# of families that also run in the interpreter, for which every layer takes seconds
SHALLOW = {"llama": {"num_hidden_layers": 1}, "gemma2": {"num_hidden_layers": 2}}


@families
def test_decoding_and_a_padded_second_turn_equal_masking(family: str, device: str) -> None:
    model = build(family, device, **SHALLOW.get(family, {}))
    ids, mask = prompts(2, 30, pads=9, device=device)
    question, question_mask = prompts(2, 7, pads=4, device=device, seed=1)
    more, more_mask = prompts(2, 5, device=device, seed=2)
    answer = one_by_one(prompts(2, 3, device=device, seed=3)[0])
    pieces = [(ids, mask), (question, question_mask), *answer, (more, more_mask), *answer]
    eviction = random_eviction(model, mask, seed=1)
    expected, cache = equal_to_masking(model, eviction, pieces)
    if family == "mistral":
        equal_to_masking(model, eviction, pieces, exact=True)
    kept = {layer: kept_tokens(chosen, mask) for layer, chosen in eviction.kept.items()}
    with running(model, NAME):
        prompt = PlanCache(model, eviction.program)
        feed(model, prompt, pieces[:1])
    assert {layer: held_tokens(prompt, layer, 2, 2) for layer in prompt.planned} == kept
    full = feed(model, None, pieces)
    assert float((full[2] - expected[2]).abs().max()) > 1e-2  # the test would notice
    assert cache.get_seq_length() == 30 + 7 + 3 + 5 + 3


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


@pytest.mark.parametrize("device", DEVICES)
def test_left_padding_keeps_the_same_tokens(device: str) -> None:
    """Also where positions are not given, so that the padding shifts them."""
    model = build("qwen3", device, num_hidden_layers=2)
    ids, mask = prompts(1, 30, device=device)
    padded = torch.cat([torch.zeros_like(ids[:, :6]), ids], 1)
    longer = torch.cat([torch.zeros_like(mask[:, :6]), mask], 1)
    for policy in ("snapkv", "keydiff", "expected_attention"):
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


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, **kwargs: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **kwargs,
    )  # fmt: skip


@families
def test_full_budgets_are_bit_identical(family: str, device: str) -> None:
    model = build(family, device, **SHALLOW.get(family, {})).to(torch.bfloat16)
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
def test_attach_gives_the_model_back(device: str) -> None:
    model = build("llama", device)
    implementation = model.config._attn_implementation
    planned = attach(model, make_full_program(model))
    with pytest.raises(ZeroDivisionError), planned, attach(model, make_full_program(model)), planned:
        assert model.config._attn_implementation == NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == implementation


LENGTH, DIM = 1100, 64


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", head_dim=DIM, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=2048)


def test_bytes_after_prefill_are_those_of_the_kept_entries(model: Any) -> None:
    ids, mask = prompts(2, LENGTH, pads=100)
    eviction = random_eviction(model, mask)
    with running(model, NAME):
        cache = PlanCache(model, eviction.program)
        feed(model, cache, [(ids, mask)])
    entries = sum(int(kept.sum()) for kept in eviction.kept.values())
    assert int(cache.entries().sum()) == entries
    exact = entries * 2 * DIM * model.dtype.itemsize
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


def phase(model: Any, policy: Policy, budgets: tuple[int, ...]) -> PhaseProgram:
    """Budgets that differ between heads, and by one from layer to layer."""
    layers = describe(model).full_layers
    table = np.array(budgets)[None] + np.arange(len(layers))[:, None]
    return PhaseProgram(dict.fromkeys(layers, policy), lambda length: table)


def one_step(model: Any, cache: Any, mask: Tensor, step: int, token: tuple[Tensor, Tensor]) -> Tensor:
    """Logits of the token `step` places after a prompt with this mask."""
    return feed(model, cache, [token], torch.cat([mask, mask.new_ones(len(mask), step)], 1))[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_decoding_equals_masking_in_every_family(family: str, device: str) -> None:
    model, policy = build(family, device), create_policy("h2o")
    ids, mask = prompts(2, 20, pads=7, device=device)
    answer = one_by_one(prompts(2, 9, device=device, seed=1)[0])
    decode = phase(model, policy, (9, 14))
    program = Program(phase(model, policy, (8, 15)), decode)
    heads = describe(model).kv_heads
    with running(model, NAME):
        cache = PlanCache(model, program)
        planned, kept = feed(model, cache, [(ids, mask)]), [columns(cache, mask, heads, 20)]
        for step, token in enumerate(answer):
            planned.append(one_step(model, cache, mask, step, token))
            kept.append(columns(cache, mask, heads, 21 + step))
    with reference(model, {}) as full:
        feed(model, full, [(ids, mask)])
        for step, token in enumerate(answer):
            hide(kept[step])
            assert_close(planned[step + 1], one_step(model, full, mask, step, token))
    limits = torch.from_numpy(decode.table(20))[:, None].expand(-1, 2, -1)
    assert bool((cache.entries() <= limits).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phases", ["prefill", "decode", "both"])
def test_generating_under_a_plan_with_each_combination_of_phases(phases: str, device: str) -> None:
    model = build("llama", device)
    plan = plan_for(model, [[6, 9]] * 4)
    prefill, decode = (plan.prefill if phases in (name, "both") else None for name in ("prefill", "decode"))
    made = plan_for(model, [[6, 9]] * 4, prefill=prefill, decode=decode)
    ids, mask = prompts(2, 20, pads=3, device=device)
    with attach(model, made) as planned:
        planned.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        held, most = planned.cache.entries(), planned.cache.most_entries()
    lengths = torch.tensor([[17], [20]])
    if phases == "prefill":
        assert held[0].tolist() == most[0].tolist() == [[13, 16]] * 2
    elif phases == "decode":
        assert held[0].tolist() == [[6, 9]] * 2
        assert torch.equal(most[0], (lengths + 1).expand(-1, 2))
    else:
        assert held[0].tolist() == [[6, 9]] * 2
        assert most[0].tolist() == [[7, 10]] * 2
