"""Tiny random models of families, and prompts for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
WIDE: dict[str, Any] = {"head_dim": 16}
UNGROUPED: dict[str, Any] = {"num_key_value_heads": None}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS: dict[str, Any] = {**WIDE, "sliding_window": 16}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
LINEAR_FULL = ["linear_attention", "full_attention"] * 2
DELTA: dict[str, Any] = {  # gated delta rule in every other layer
    **WIDE, "layer_types": LINEAR_FULL, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """What a tiny random model of a family is made of.

    Args:
        model: the class of its language models, by its name in transformers.
        changes: settings besides those of `SHAPE`.
        config: the class of their configuration; default: it is called as the model is.
    """

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None


# by the model_type of their configurations, and those that are refused
TINY: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaForCausalLM", WIDE),
    "mistral": TinyModel("MistralForCausalLM", {**WIDE, "sliding_window": None}),
    "qwen2": TinyModel("Qwen2ForCausalLM"),
    "qwen3": TinyModel("Qwen3ForCausalLM", WIDE),
    "phi3": TinyModel("Phi3ForCausalLM"),
    "gemma2": TinyModel("Gemma2ForCausalLM", {**WINDOWS, "query_pre_attn_scalar": 16}),
    "gemma3": TinyModel(
        "Gemma3ForCausalLM",
        {**WINDOWS, "layer_types": LOCAL_GLOBAL, "query_pre_attn_scalar": 16},
        config="Gemma3TextConfig",
    ),
    "apertus": TinyModel("ApertusForCausalLM"),
    "arcee": TinyModel("ArceeForCausalLM"),
    "bitnet": TinyModel("BitNetForCausalLM"),
    "cohere": TinyModel("CohereForCausalLM"),
    "ernie4_5": TinyModel("Ernie4_5ForCausalLM"),
    "gemma": TinyModel("GemmaForCausalLM", WIDE),
    "glm": TinyModel("GlmForCausalLM", WIDE),
    "glm4": TinyModel("Glm4ForCausalLM", WIDE),
    "gpt_neox": TinyModel("GPTNeoXForCausalLM", UNGROUPED),
    "granite": TinyModel("GraniteForCausalLM"),
    "granitemoe": TinyModel("GraniteMoeForCausalLM", EXPERTS),
    "helium": TinyModel("HeliumForCausalLM", {"head_dim": 8}),
    "hunyuan_v1_dense": TinyModel("HunYuanDenseV1ForCausalLM", WIDE),
    "mixtral": TinyModel("MixtralForCausalLM", EXPERTS),
    "nemotron": TinyModel("NemotronForCausalLM"),
    "olmo": TinyModel("OlmoForCausalLM"),
    "olmo2": TinyModel("Olmo2ForCausalLM"),
    "persimmon": TinyModel("PersimmonForCausalLM", UNGROUPED),
    "phi": TinyModel("PhiForCausalLM"),
    "phimoe": TinyModel("PhimoeForCausalLM", EXPERTS),
    "qwen2_moe": TinyModel("Qwen2MoeForCausalLM", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": TinyModel("Qwen3MoeForCausalLM", {**WIDE, **QWEN_EXPERTS}),
    "seed_oss": TinyModel("SeedOssForCausalLM", WIDE),
    "smollm3": TinyModel("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "stablelm": TinyModel("StableLmForCausalLM"),
    "starcoder2": TinyModel("Starcoder2ForCausalLM", {"sliding_window": None}),
    "minimax_m2": TinyModel("MiniMaxM2ForCausalLM", {**WIDE, **EXPERTS}),
    "gpt_oss": TinyModel("GptOssForCausalLM", {**WINDOWS, "layer_types": LOCAL_GLOBAL, **EXPERTS}),
    "jamba": TinyModel("JambaForCausalLM", MAMBA),
    "lfm2": TinyModel("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4": TinyModel(
        "Llama4ForCausalLM",
        {
            **WIDE,
            "attention_chunk_size": 16,
            "no_rope_layer_interval": 2,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
        },
        config="Llama4TextConfig",
    ),
    "minimax": TinyModel("MiniMaxForCausalLM", {**WIDE, "layer_types": LINEAR_FULL[::-1], "block_size": 8, **EXPERTS}),
    "qwen3_5": TinyModel("Qwen3_5ForCausalLM", DELTA, config="Qwen3_5TextConfig"),
    "qwen3_next": TinyModel("Qwen3NextForCausalLM", {**DELTA, **QWEN_EXPERTS, "shared_expert_intermediate_size": 32}),
    "bloom": TinyModel("BloomForCausalLM"),
    "falcon": TinyModel("FalconForCausalLM"),
    "mpt": TinyModel("MptForCausalLM"),
}

REFUSED = ("bloom", "falcon", "mpt")  # the runtime cannot serve them

# all that is done to a model is tested on these; the others have one test each (tests/runtime/test_families.py)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
USUAL = ("llama", "qwen3", "gemma2")  # of which these run before every commit
EACH_FAMILY = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.nightly]) for name in FAMILIES]
# what their attention or their other layers need is tested on these
SPECIAL = ("gpt_oss", "jamba", "lfm2", "llama4", "minimax", "qwen3_5", "qwen3_next")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
if (asked := os.environ.get("KVSEARCH_TEST_DEVICE")) is not None:  # tests of the runtime on another device only
    DEVICES = [asked]
    if asked.startswith("fakegpu"):
        from tests.device.accelerator import backend

        backend()


def prompts(batch: int, length: int, pads: int = 0, device: str = "cpu", seed: int = 0) -> tuple[Any, Any]:
    """Random ids [batch, length] and their attention mask; the first row starts with `pads` padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return ids.to(device), mask.to(device)


def build(name: str, device: str = "cpu", **changes: Any) -> Any:
    """Make a tiny random model of a family, with weights large enough for attention to be far from uniform."""
    import transformers

    tiny = TINY[name]
    config_class = getattr(transformers, tiny.config or tiny.model.removesuffix("ForCausalLM") + "Config")
    torch.manual_seed(1)
    model = getattr(transformers, tiny.model)(config_class(**{**SHAPE, **tiny.changes, **changes}))
    model.set_attn_implementation("sdpa" if model._supports_sdpa and name != "gemma2" else "eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.25 if parameter.dim() > 1 else 1.0)
    return model.eval().to(device)
