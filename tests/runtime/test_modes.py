"""Every way of generating, over families and plans: as over a stock cache where nothing is evicted, no crash elsewhere.

What a plan cannot do is refused in one line; nothing is answered differently without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache as once
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.core.errors import KvsearchError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from tests.combinations import in_turn
from tests.families import DEVICES, EACH_FAMILY, FAMILIES, SPECIAL, build, prompts
from tests.runtime.helpers import held_tokens, random_eviction, reference, running
from tests.runtime.modes import BATCH, LENGTH, MODES, Mode, Side, more, ones
from tests.runtime.places import SLOW_PLACES, at
from tests.runtime.policies import FIRST, KINDS, SMALL, for_model, policies_of

ENOUGH = 10**6
TOLERANCE = 1e-4
PHASES = ("prefill", "decode", "both")
# what a plan refuses, by what its message says; everything else must be as over a stock cache
REFUSED = (
    "cannot take tokens back",  # what evicts while decoding, and running states
    "forgets its running state",  # transformers' code for the family
    "drafts need",
    "prompt lookup and assisted decoding",
    "no tensor of all keys and values",
    "holds its last",  # sliding windows that forget
    "tokens were read and",  # transformers' drafts read a conversation anew, with its mask, into the same cache
)


@once
def model_of(family: str) -> Any:
    """Two layers are as good as more, unless they differ, and where they differ in turn."""
    return build(family, **({"num_hidden_layers": 2} if family in ("llama", "gemma2") else {}))


def program(model: Any, name: str, phases: str, budget: int) -> Program:
    shape = describe(model)
    policy = for_model(SMALL[name])
    table = np.full((len(shape.full_layers), shape.kv_heads), budget, dtype=np.int64)
    table[:, -1] += 3 * (budget < ENOUGH)
    phase = PhaseProgram(dict.fromkeys(shape.full_layers, policy), lambda _: table)
    return Program(phase if phases != "decode" else None, phase if phases != "prefill" else None)


def outcome(mode: Mode, side: Side) -> list[Tensor] | None:
    """What a mode yields; None if a plan refuses it, in one line and for a reason that is known."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(mode(side))
    except KvsearchError as refusal:
        assert any(reason in str(refusal) for reason in REFUSED), refusal
        assert "\n" not in str(refusal)
        return None


def compare(family: str, name: str, policy: str, phases: str) -> None:
    model, mode = model_of(family), MODES[name]
    try:
        stock = outcome(mode, Side(model))
    except Exception:  # noqa: BLE001 - what transformers itself cannot do with this family is nothing to compare with
        pytest.skip("not with a stock cache")
    with attach(model, program(model, policy, phases, ENOUGH)) as planned:
        found = outcome(mode, Side(model, planned))
    if found is None:
        return
    assert len(found) == len(stock)
    for mine, theirs in zip(found, stock, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def evict(family: str, name: str, policy: str, phases: str) -> None:
    model = model_of(family)
    with attach(model, program(model, policy, phases, 9)) as planned:
        found = outcome(MODES[name], Side(model, planned))
    assert all(bool(part.isfinite().all()) for part in found or () if part.is_floating_point())


@in_turn(mode=MODES, phases=["prefill", "decode", "both"])
def test_modes_are_as_over_a_stock_cache(mode: str, phases: str) -> None:
    """And end well where something is evicted."""
    compare("llama", mode, "tova", phases)
    evict("llama", mode, "h2o", phases)


HIDING = ("masks_that_hide_what_was_read", "turns_that_hide_other_tokens_each", "beams", "gradients")


@pytest.mark.nightly
@in_turn(family=[*FAMILIES[1:], *SPECIAL], other=["turns_that_hide_other_tokens_each", "beams", "padded_questions"])
def test_masks_in_all_families(family: str, other: str) -> None:
    for mode in ("masks_that_hide_what_was_read", other):
        if family == "minimax" and mode == "beams":
            continue  # transformers' own cache for it does not reorder running states with the beams
        compare(family, mode, "snapkv{'window': 4, 'kernel': 3, 'sinks': 1}", "both")
        evict(family, mode, "tova", "prefill")


@in_turn(policy=policies_of(FIRST[kind] for kind in KINDS), mode=HIDING)
def test_masks_and_gradients_under_every_policy(policy: str, mode: str) -> None:
    compare("llama", mode, policy, "both")
    evict("llama", mode, policy, "both")


@in_turn(family=["llama", "gemma2", "gpt_oss"], phases=["both", "decode", "prefill"], place=SLOW_PLACES)
def test_masks_in_every_store(family: str, phases: str, place: str) -> None:
    with at(place):
        compare(family, "masks_that_hide_what_was_read", "streaming{'sinks': 2}", phases)
        evict(family, "masks_that_hide_what_was_read", "streaming{'sinks': 2}", phases)


def wrong_masks() -> Iterator[tuple[str, Any, str]]:
    good = torch.cat([prompts(BATCH, LENGTH, pads=5)[1], ones(2)], 1)
    yield "too short", good[:, 1:], "attention_mask has 25 columns: 24 tokens were read and 2 come, so it takes 26"
    yield "missing", None, "attention_mask shows padding of sequence 0, of which nothing was kept, or is missing"
    shows = good.clone()
    shows[0, 2] = 1
    yield "shows padding", shows, "attention_mask shows padding of sequence 0"
    empty = good.clone()
    empty[1] = 0
    yield "hides a sequence", empty, "attention_mask hides every token of sequence 1"
    four = good[:, None, None].bool().repeat(1, 1, 2, 1)
    yield "not causal", four, "hides other tokens from one row than from the next"
    yield "biases", torch.zeros(four.shape) - 0.5, "attention_mask adds numbers to logits"


@in_turn(case=wrong_masks(), phases=PHASES)
@torch.no_grad()
def test_masks_that_cannot_be(case: tuple[str, Any, str], phases: str) -> None:
    """One line each, and the cache goes on as if they had not been given."""
    _, wrong, message = case
    model = model_of("llama")
    ids, mask = prompts(BATCH, LENGTH, pads=5)
    good = torch.cat([mask, ones(2)], 1)
    with attach(model, program(model, "tova", phases, 9)) as planned:
        cache, untouched = planned.new_cache(), planned.new_cache()
        side = Side(model, planned)
        for each in (cache, untouched):
            side.forward(each, ids, mask)
        with pytest.raises(UsageError) as caught:
            side.forward(cache, more(2), wrong, position_ids=torch.arange(2)[None] + LENGTH)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert torch.equal(side.forward(cache, more(2), good), side.forward(untouched, more(2), good))


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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_need_to_know_where_the_prompt_ends(device: str) -> None:
    model = build("llama", device)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 8], device=device)
    with running(model, NAME), pytest.raises(UsageError, match="give PlanCache the prompt_length"):
        model.generate(ids, past_key_values=PlanCache(model, snapkv(model)), prompt_lookup_num_tokens=3,
                       max_new_tokens=8, do_sample=False)  # fmt: skip
