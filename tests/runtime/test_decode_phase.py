"""Plans with a decode phase on whole models: attention over what is held equals a full cache with a mask."""

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
from kvsearch.runtime.program import PhaseProgram
from tests.combinations import every_value, in_turn
from tests.families import DEVICES, EACH_FAMILY, build, prompts
from tests.runtime.helpers import assert_close, columns, feed, hide, one_by_one, plan_for, reference, running
from tests.runtime.policies import SMALL, for_model, policies_of

pytestmark = pytest.mark.parametrize("device", DEVICES)
REVERSIBLE = [name for name, policy in SMALL.items() if not policy.merges]


def phase(model: Any, policy: Policy, budgets: tuple[int, ...]) -> PhaseProgram:
    """Budgets that differ between heads, and by one from layer to layer."""
    layers = describe(model).full_layers
    table = np.array(budgets)[None] + np.arange(len(layers))[:, None]
    return PhaseProgram(dict.fromkeys(layers, policy), lambda length: table)


def one_step(model: Any, cache: Any, mask: Tensor, step: int, token: tuple[Tensor, Tensor]) -> Tensor:
    """Logits of the token `step` places after a prompt with this mask."""
    return feed(model, cache, [token], torch.cat([mask, mask.new_ones(len(mask), step)], 1))[0]


@every_value(name=policies_of(REVERSIBLE), prefilled=[False, True])
def test_decoding_equals_masking(name: str, prefilled: bool, device: str) -> None:
    compare("llama", for_model(SMALL[name]), prefilled, device)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_decoding_equals_masking_in_every_family(family: str, device: str) -> None:
    for name in ("h2o", "snapkv"):
        compare(family, create_policy(name, {"window": 4} if name == "snapkv" else {}), True, device)


def compare(family: str, policy: Policy, prefilled: bool, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 20, pads=7, device=device)
    answer = one_by_one(prompts(2, 9, device=device, seed=1)[0])
    decode = phase(model, policy, (9, 14))
    program = Program(phase(model, policy, (8, 15)) if prefilled else None, decode)
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
    if policy.name not in ("full", "duo_attention"):  # some heads of theirs grow
        limits = torch.from_numpy(decode.table(20))[:, None].expand(-1, 2, -1)
        assert bool((cache.entries() <= limits).all())


@in_turn(name=policies_of(), dtype=[torch.float32, torch.bfloat16])
def test_a_budget_above_the_length_is_the_full_cache_bit_for_bit(name: str, dtype: torch.dtype, device: str) -> None:
    model = build("llama", device).to(dtype)
    ids, mask = prompts(1, 20, device=device)
    pieces = [(ids, mask), prompts(1, 3, device=device, seed=2), *one_by_one(prompts(1, 4, device=device, seed=1)[0])]
    roomy = phase(model, for_model(SMALL[name]), (40, 50))
    with running(model, NAME):
        planned = feed(model, PlanCache(model, Program(roomy, roomy), exact=True), pieces)
    for actual, expected in zip(planned, feed(model, DynamicCache(config=model.config), pieces), strict=True):
        assert torch.equal(actual, expected)


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
