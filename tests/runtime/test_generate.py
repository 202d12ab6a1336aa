"""Every way of generating, under a plan: against stock caches where nothing is evicted, against masking where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsearch.core.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from tests.combinations import in_turn
from tests.families import DEVICES, EACH_FAMILY, build, prompts
from tests.runtime.helpers import held_tokens, random_eviction, reference, running

pytestmark = pytest.mark.parametrize("device", DEVICES)
SOME_FAMILIES = ["llama", "qwen3", "gemma2", "gemma3"]

DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 3, "temperature": 1.5},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "several beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
}


def snapkv(model: Any) -> Program:
    return Program.uniform(model, create_policy("snapkv", {"window": 4, "kernel": 3}), lambda length: 12)


@in_turn(family=EACH_FAMILY, way=DECODING)
def test_evicted_prompts_generate_what_masking_does(family: str, way: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, pads=6, device=device)
    rows = DECODING[way].get("num_beams", 1)
    sequences = rows if rows > 1 else DECODING[way].get("num_return_sequences", 1)
    # transformers repeats every prompt for its beams or samples before the first forward pass
    eviction = random_eviction(model, mask, seed=3)
    for policy in eviction.program.policies:
        object.__setattr__(policy, "scores", policy.scores.repeat_interleave(sequences, 0))
    kept = {layer: chosen.repeat_interleave(sequences, 0) for layer, chosen in eviction.kept.items()}
    options = {**DECODING[way], "attention_mask": mask, "max_new_tokens": 8}
    with attach(model, eviction.program) as planned:
        torch.manual_seed(5)
        tokens = planned.generate(ids, **options)
    torch.manual_seed(5)
    with reference(model, kept) as full:
        assert torch.equal(tokens, model.generate(ids, past_key_values=full, **options))


@in_turn(family=SOME_FAMILIES, tokens=[1, 3, 7])
def test_prompt_lookup_decoding_equals_plain_decoding(family: str, tokens: int, device: str) -> None:
    """A repetitive prompt is drafted from at once: the first forward pass holds more than the prompt."""
    model = build(family, device)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 8], device=device)
    with attach(model, snapkv(model), graphs=False) as planned:
        plain = planned.generate(ids, max_new_tokens=16, do_sample=False)
        kept = {layer: planned.cache.kept_positions(layer)[:12] for layer in planned.cache.planned}
        assisted = planned.generate(ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=tokens)
        assert torch.equal(assisted, plain)
        for layer in planned.cache.planned:
            assert planned.cache.kept_positions(layer)[:12] == kept[layer]
            assert len(planned.cache.kept_positions(layer)) == 12 + 15


@in_turn(
    family=SOME_FAMILIES,
    chunk=[1, 7, 13, 40, 64],  # 40 = 3 * 13 + 1: the last chunk has one token
    policy=["snapkv", "expected_attention", "keydiff"],
)
def test_chunked_prefill_equals_one_pass(family: str, chunk: int, policy: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 40, pads=6, device=device)
    program = Program.uniform(model, create_policy(policy), lambda length: length // 3)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with attach(model, program) as planned:
        expected = planned.generate(ids, **options)
        one_pass = planned.cache
        actual = planned.generate(ids, prefill_chunk_size=chunk, **options)
        assert planned.cache is not one_pass
        for layer in planned.cache.planned:
            assert held_tokens(planned.cache, layer, 2, 2) == held_tokens(one_pass, layer, 2, 2)
    assert torch.equal(actual, expected)


def test_drafts_need_to_know_where_the_prompt_ends(device: str) -> None:
    model = build("llama", device)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 8], device=device)
    with running(model, NAME), pytest.raises(UsageError, match="give PlanCache the prompt_length"):
        model.generate(ids, past_key_values=PlanCache(model, snapkv(model)), prompt_lookup_num_tokens=3,
                       max_new_tokens=8, do_sample=False)  # fmt: skip
