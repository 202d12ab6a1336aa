"""A budget that evicts nothing changes nothing, and no budget changes the prompt's own hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvsearch.runtime import PlanCache, attach
from kvsearch.runtime.attention import NAME
from tests.families import build, prompts
from tests.runtime.helpers import keep_everything, random_eviction, running
from tests.runtime.places import families


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, **kwargs: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **kwargs,
    )  # fmt: skip


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_budgets_are_bit_identical(family: str, dtype: torch.dtype, device: str) -> None:
    model = build(family, device).to(dtype)
    ids, mask = prompts(1, 40, device=device)
    stock = generate(model, ids, mask, DynamicCache(config=model.config))
    with running(model, NAME):
        planned = generate(model, ids, mask, PlanCache(model, keep_everything(model), exact=True))
    assert torch.equal(planned.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(planned.logits, stock.logits, strict=True))


@families
def test_eviction_leaves_the_prompts_hidden_states_alone(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 40, pads=7, device=device)
    with torch.no_grad():
        stock = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config),
                      output_hidden_states=True)  # fmt: skip
        with running(model, NAME):
            cache = PlanCache(model, random_eviction(model, mask).program)
            planned = model(ids, attention_mask=mask, past_key_values=cache, output_hidden_states=True)
    assert len(planned.hidden_states) == 5
    for actual, expected in zip(planned.hidden_states, stock.hidden_states, strict=True):
        assert torch.equal(actual[mask.bool()], expected[mask.bool()])


@families
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


@families
def test_attach_gives_the_model_back(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(1, 20, device=device)
    before, implementation = model(ids).logits, model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attach(model, random_eviction(model, mask).program) as planned:
        planned.generate(ids, max_new_tokens=2, do_sample=False)
        assert model.config._attn_implementation == NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, before)
    with planned, attach(model, keep_everything(model)), planned:
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == implementation
