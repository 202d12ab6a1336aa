"""Every way of generating, under a plan: against stock caches where nothing is evicted, against masking where it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvsearch.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from tests.families import DEVICES, FAMILIES, build, prompts
from tests.runtime.helpers import assert_close, feed, keep_everything, random_eviction, reference, running

pytestmark = pytest.mark.parametrize("device", DEVICES)
families = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])

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


@families
@pytest.mark.parametrize("way", DECODING)
def test_full_budgets_generate_what_a_stock_cache_does(family: str, way: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, pads=6, device=device)
    options = {**DECODING[way], "attention_mask": mask, "max_new_tokens": 8}
    torch.manual_seed(5)
    stock = model.generate(ids, **options)
    with attach(model, keep_everything(model)) as planned:
        torch.manual_seed(5)
        assert torch.equal(planned.generate(ids, **options), stock)


@families
@pytest.mark.parametrize("way", DECODING)
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


@some_families
def test_a_second_turn_through_generate(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, pads=6, device=device)
    question, question_mask = prompts(2, 6, pads=2, device=device, seed=1)
    eviction = random_eviction(model, mask, seed=4)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "output_logits": True,
                               "return_dict_in_generate": True}  # fmt: skip

    def chat(generate: Any, **cache: Any) -> Any:
        first = generate(ids, attention_mask=mask, **cache, **options)
        # the last token was returned but never fed
        turn = torch.cat([first.sequences, question], 1)
        turn_mask = torch.cat([mask, torch.ones_like(first.sequences[:, 30:]), question_mask], 1)
        second = generate(turn, attention_mask=turn_mask, past_key_values=first.past_key_values, **options)
        return torch.stack([*first.logits, *second.logits])

    with attach(model, eviction.program) as planned:
        actual = chat(planned.generate)
        assert planned.cache is not None
        assert planned.cache.get_seq_length() == 30 + 5 + 6 + 4
    with reference(model, eviction.kept) as full:
        assert_close(actual, chat(model.generate, past_key_values=full))


@some_families
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_prompt_lookup_decoding_equals_plain_decoding(family: str, tokens: int, device: str) -> None:
    """A repetitive prompt is drafted from at once: the first forward pass holds more than the prompt."""
    model = build(family, device)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 8], device=device)
    with attach(model, snapkv(model)) as planned:
        plain = planned.generate(ids, max_new_tokens=16, do_sample=False)
        kept = {layer: planned.cache.kept_positions(layer)[:12] for layer in planned.cache.planned}
        assisted = planned.generate(ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=tokens)
        assert torch.equal(assisted, plain)
        for layer in planned.cache.planned:
            assert planned.cache.kept_positions(layer)[:12] == kept[layer]
            assert len(planned.cache.kept_positions(layer)) == 12 + 15


def test_the_first_draft_sees_what_eviction_leaves(device: str) -> None:
    """Also for a policy that needs query statistics, and where a padded batch drafts."""
    model = build("qwen3", device)
    ids, mask = prompts(2, 36, pads=5, device=device)
    for policy in ("expected_attention", "snapkv", "streaming"):
        program = Program.uniform(model, create_policy(policy), lambda length: 9)
        pieces = [(ids[:, :32], mask[:, :32]), (ids[:, 32:], mask[:, 32:])]
        for exact in (False, True):
            with running(model, NAME):
                apart, together = (PlanCache(model, program, prompt_length=32, exact=exact) for _ in range(2))
                expected = torch.cat(feed(model, apart, pieces), 1)
                (actual,) = feed(model, together, [(ids, mask)])
            assert_close(actual[mask.bool()], expected[mask.bool()])
            assert together.entries().tolist() == apart.entries().tolist() == [[[13, 13], [13, 13]]] * 4
            for layer in range(4):
                assert together.kept_positions(layer, 1) == apart.kept_positions(layer, 1)


def test_the_first_draft_under_full_budgets_is_bit_exact_for_the_prompt(device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(1, 36, device=device)
    with running(model, NAME):
        cache = PlanCache(model, keep_everything(model), prompt_length=32, exact=True)
        (logits,) = feed(model, cache, [(ids, mask)])
    stock = feed(model, DynamicCache(config=model.config), [(ids, mask)])[0]
    assert_close(logits, stock)


@some_families
def test_assistant_models(family: str, device: str) -> None:
    model, assistant = build(family, device), build(family, device, num_hidden_layers=2, layer_types=None)
    ids, _ = prompts(1, 30, device=device)
    with attach(model, snapkv(model)) as planned:
        plain = planned.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(planned.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=assistant), plain)


@some_families
@pytest.mark.parametrize("chunk", [1, 7, 13, 40, 64])  # 40 = 3 * 13 + 1: the last chunk has one token
@pytest.mark.parametrize("policy", ["snapkv", "expected_attention", "keydiff"])
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
        assert planned.cache is not None
        assert one_pass is not None
        for layer in planned.cache.planned:
            for row in (0, 1):
                for head in (0, 1):
                    kept = planned.cache.kept_positions(layer, row, head)
                    assert kept == one_pass.kept_positions(layer, row, head)
    assert torch.equal(actual, expected)


def test_embeddings_as_a_prompt(device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(2, 40, pads=6, device=device)
    embeddings = model.get_input_embeddings()(ids)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with attach(model, snapkv(model)) as planned:
        expected = planned.generate(ids, **options)[:, 40:]
        assert torch.equal(planned.generate(inputs_embeds=embeddings, **options), expected)
        assert planned.cache is not None
        assert planned.cache.get_seq_length() == 47
        assert {layer.prompt_length for layer in planned.cache.planned.values()} == {40}


def test_the_prompt_may_be_named_inputs(device: str) -> None:
    model = build("llama", device)
    ids, _ = prompts(1, 20, device=device)
    with attach(model, snapkv(model)) as planned:
        expected = planned.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(planned.generate(inputs=ids, max_new_tokens=4, do_sample=False), expected)
        assert torch.equal(planned.generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)


@some_families
def test_another_question_about_the_same_context(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, pads=6, device=device)
    questions = [prompts(2, 5 + i, pads=i, device=device, seed=i + 1) for i in range(3)]
    program = snapkv(model)
    with running(model, NAME):
        reused = PlanCache(model, program)
        feed(model, reused, [(ids, mask)])
        reused.activate_past_recording()
        for question in questions:
            fresh = PlanCache(model, program)
            expected = feed(model, fresh, [(ids, mask), question])[1]
            actual = ask(model, reused, mask, question)
            assert_close(actual, expected)
            reused.crop(-question[0].shape[1])
            assert reused.get_seq_length() == 30


@torch.no_grad()
def ask(model: Any, cache: PlanCache, mask: torch.Tensor, question: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    seen = torch.cat([mask, question[1]], 1)
    positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, mask.shape[1] :]
    logits: torch.Tensor = model(question[0], attention_mask=seen, position_ids=positions, past_key_values=cache).logits
    return logits


def test_copies_of_a_prompts_cache_go_separate_ways(device: str) -> None:
    model = build("llama", device)
    ids, mask = prompts(1, 30, device=device)
    with attach(model, snapkv(model)) as planned:
        cache = planned.new_cache()
        feed(model, cache, [(ids, mask)])
        answers = []
        for seed in (1, 2, 1):
            question = prompts(1, 5, device=device, seed=seed)[0]
            mine = copy.deepcopy(cache)
            answers.append(planned.generate(torch.cat([ids, question], 1), past_key_values=mine, max_new_tokens=6,
                                            do_sample=False))  # fmt: skip
        assert cache.get_seq_length() == 30
    assert torch.equal(answers[0], answers[2])
    with pytest.raises(UsageError, match="attention implementation"):  # the copy knows what the model runs now
        model(ids[:, :1], past_key_values=mine)


def test_a_cache_of_ones_own(device: str) -> None:
    """Made before its prompt is known, used again after a reset: eviction still waits for the whole prompt."""
    model = build("llama", device)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with attach(model, snapkv(model)) as planned:
        mine = planned.new_cache()
        for length in (40, 60, 20):
            ids = torch.arange(length, device=device)[None] % 7 + 3
            expected = planned.generate(ids, **options)
            for way in ({}, {"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}):
                assert torch.equal(planned.generate(ids, past_key_values=mine, **options, **way), expected)
                assert planned.cache is mine
                assert mine.entries().unique().tolist() == [12 + 5]
                mine.reset()


def test_drafts_need_to_know_where_the_prompt_ends(device: str) -> None:
    model = build("llama", device)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 8], device=device)
    with running(model, NAME), pytest.raises(UsageError, match="give PlanCache the prompt_length"):
        model.generate(ids, past_key_values=PlanCache(model, snapkv(model)), prompt_lookup_num_tokens=3,
                       max_new_tokens=8, do_sample=False)  # fmt: skip


def test_a_cache_can_be_reset(device: str) -> None:
    model = build("gemma3", device)
    ids, mask = prompts(2, 30, pads=4, device=device)
    other, other_mask = prompts(2, 20, pads=9, device=device, seed=3)
    with running(model, NAME):
        used, fresh = PlanCache(model, snapkv(model)), PlanCache(model, snapkv(model))
        feed(model, used, [(ids, mask), (ids[:, :1], mask[:, -1:])])
        used.reset()
        assert used.get_seq_length() == 0
        expected = feed(model, fresh, [(other, other_mask), (ids[:, :1], mask[:, -1:])])
        for actual, wanted in zip(
            feed(model, used, [(other, other_mask), (ids[:, :1], mask[:, -1:])]), expected, strict=True
        ):
            assert torch.equal(actual, wanted)
