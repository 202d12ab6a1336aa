"""What code written for stock caches asks: keys and values, attention weights, positions."""

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
from tests.families import build, prompts

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
        for program, words in (
            (eight(model), "8 to 8"),
            (make_full_program(model), "17 to 20"),
        ):
            cache = PlanCache(model, program)
            model(ids, attention_mask=mask, past_key_values=cache)
            for name in ("keys", "values"):
                with pytest.raises(UsageError, match=rf"layer 1 .* of 20 tokens its heads hold {words} entries"):
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
        with pytest.raises(UsageError, match="drop output_attentions"):
            model.generate(ids, prompt_lookup_num_tokens=2, past_key_values=planned.new_cache(LENGTH), **asked)
        assert planned.generate(ids, max_new_tokens=3, prompt_lookup_num_tokens=2).shape[1] == LENGTH + 3


def test_more_tokens_than_positions_are_warned_about(model: Any, recwarn: pytest.WarningsRecorder) -> None:
    ids, _ = prompts(1, LENGTH)
    model.config.max_position_embeddings = LENGTH + 2
    with attach(model, eight(model)) as planned:
        planned.generate(ids, max_new_tokens=3)  # the last token is never read
        assert not [one for one in recwarn if issubclass(one.category, KvsearchWarning)]
        with pytest.warns(KvsearchWarning, match="23 tokens have passed, evicted ones counted.*for 22: "):
            planned.generate(ids, max_new_tokens=4)
