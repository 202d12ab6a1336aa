from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from kvsearch.core.errors import IncompatibleError
from kvsearch.models.architecture import (
    RotaryTables,
    describe,
    find_attention_modules,
    find_decoder,
    find_text_config,
    read_output_weight,
    require_same_rotary,
    unrotate,
)
from tests.families import FAMILIES, build

families = pytest.mark.parametrize("family", FAMILIES)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@families
def test_the_shape_of_a_model(family: str) -> None:
    shape = describe(build(family))
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.group) == (4, 8, 2, 4)
    assert shape.head_dim == (8 if family in ("qwen2", "phi3") else 16)
    assert (shape.hidden_size, shape.max_positions) == (64, 512)
    assert shape.full_layers == ((1, 3) if family.startswith("gemma") else (0, 1, 2, 3))
    assert shape.model_type == {"gemma3": "gemma3_text"}.get(family, family)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("phi3", {"rope_parameters": PARTIAL}),
    ],
    ids=lambda value: str(value.get("rope_parameters", {}).get("rope_type", "")) if isinstance(value, dict) else value,
)
def test_unrotate_undoes_the_models_own_rotation(family: str, changes: dict[str, Any]) -> None:
    model = build(family, **changes)
    layer = describe(model).full_layers[0]
    module: Any = find_attention_modules(model)[layer]
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    tables = RotaryTables(model, layer)
    positions = torch.tensor([0, 1, 7, 100, 411])
    cos, sin = (table[None] for table in tables(positions))
    if changes.get("rope_parameters") is PARTIAL:
        assert cos.shape[-1] == 4 < describe(model).head_dim
    if changes.get("rope_parameters") is YARN:
        assert float(cos[0, 0, 0]) > 1.1  # yarn scales both tables
    states = torch.randn(2, 3, 5, describe(model).head_dim, generator=torch.Generator().manual_seed(0))
    query, key = apply(states, states, cos, sin)
    torch.testing.assert_close(unrotate(query, cos, sin), states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        unrotate(key, cos.expand(2, -1, -1), sin.expand(2, -1, -1)), states, atol=1e-5, rtol=1e-5
    )


@families
def test_tables_are_those_of_full_attention_layers(family: str) -> None:
    model = build(family)
    positions = torch.arange(20)
    cos, sin = RotaryTables(model, 1)(positions)
    assert cos.dtype == sin.dtype == torch.float32
    module: Any = find_decoder(model).rotary_emb
    extra = ("full_attention",) if family == "gemma3" else ()
    expected = module(torch.zeros(1, dtype=torch.float32), positions[None], *extra)
    assert torch.equal(cos, expected[0][0])
    assert torch.equal(sin, expected[1][0])
    if family == "gemma3":
        local = module(torch.zeros(1), positions[None], "sliding_attention")
        assert not torch.allclose(cos, local[0][0])


def test_tables_of_a_half_precision_model_are_not_rounded() -> None:
    cos, sin = RotaryTables(build("llama").to(torch.bfloat16), 0)(torch.arange(300))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


@families
def test_output_weights_per_query_head(family: str) -> None:
    model = build(family)
    shape, module = describe(model), find_attention_modules(model)[0]
    weight = read_output_weight(module, shape.query_heads)
    assert weight.shape == (shape.query_heads, shape.head_dim, shape.hidden_size)
    heads = torch.randn(shape.query_heads, shape.head_dim)
    summed = torch.einsum("hd,hdm->m", heads, weight)
    torch.testing.assert_close(summed, module.o_proj(heads.flatten()), atol=1e-5, rtol=1e-5)  # type: ignore[operator]


def test_layers_without_rotary_embedding() -> None:
    """SmolLM3 leaves the rotary embedding out of some layers, Jamba has none."""
    positions, states = torch.arange(5), torch.randn(1, 2, 5, 8)
    for model, layer, turns in ((build("smollm3"), 0, True), (build("smollm3"), 1, False), (build("jamba"), 1, False)):
        cos, sin = RotaryTables(model, layer)(positions)
        assert torch.equal(unrotate(states, cos[None], sin[None]), states) != turns


def test_output_weights_by_other_names() -> None:
    """`dense`, `out_proj`; a module without any of them is an error in one line."""
    for family in ("phi", "gpt_neox", "lfm2"):
        model = build(family)
        shape, modules = describe(model), find_attention_modules(model)
        weight = read_output_weight(modules[shape.full_layers[0]], shape.query_heads)
        assert weight.shape == (shape.query_heads, shape.head_dim, shape.hidden_size)
    with pytest.raises(IncompatibleError, match="Linear has no output projection under a name that is known here"):
        read_output_weight(nn.Linear(2, 2), 1)


def test_the_attention_of_hybrids() -> None:
    """Only layers that have attention have an attention module; layers keep their index."""
    model = build("jamba")
    assert list(find_attention_modules(model)) == [1, 3]
    assert describe(model).kinds == ("linear_attention", "full_attention") * 2


def test_a_model_whose_layers_are_not_known() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(IncompatibleError, match="no decoder with layers of attention found"):
        find_decoder(model)


def test_text_models_inside_multimodal_ones() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = build("gemma3").config
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text.to_dict(), vision_config=vision))
    assert find_text_config(model).num_hidden_layers == 4
    assert describe(model).full_layers == (1, 3)
    assert len(find_attention_modules(model)) == 4


def test_messages_name_the_model_within_a_wrapper_and_the_place() -> None:
    class PeftModelForCausalLM(nn.Module):  # as PEFT puts around a model
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.base_model, self.config = model, model.config

        def get_base_model(self) -> Any:
            return self.base_model

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = PeftModelForCausalLM(build("llama", rope_parameters=rope))
    require_same_rotary(model, [512], 0, "task one")
    with pytest.raises(IncompatibleError, match=r"^LlamaForCausalLM has other rotary .* shorten prompt or reply by 1$"):
        require_same_rotary(model, [510], 3)
    with pytest.raises(IncompatibleError, match=r"^task one: LlamaForCausalLM .* by 1 \(--max-length cuts contexts\)$"):
        require_same_rotary(model, [510], 3, "task one")
