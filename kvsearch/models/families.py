"""The model families that are tested: one table, which the tests, `kvsearch doctor --families` and the docs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
class Family:
    """A family of transformers' models, and what a tiny one of it is made of.

    Args:
        model: the class of its language models, by its name in transformers.
        changes: settings of the tiny model besides those of `SHAPE`.
        config: the class of their configuration; default: it is called as the model is.
        unrotates: whether queries can be turned back to position 0, which some policies need. They cannot where the
            rotary embedding is interleaved, or a norm with weights follows it.
        continues: whether its own code goes on from a prompt with several tokens at once as with one after the other.
        refused: whether the runtime cannot serve it.
    """

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    unrotates: bool = True
    continues: bool = True
    refused: bool = False


# by the model_type of its configuration, without "_text" at the end
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", WIDE),
    "mistral": Family("MistralForCausalLM", {**WIDE, "sliding_window": None}),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", WIDE),
    "phi3": Family("Phi3ForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", {**WINDOWS, "query_pre_attn_scalar": 16}),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {**WINDOWS, "layer_types": LOCAL_GLOBAL, "query_pre_attn_scalar": 16},
        config="Gemma3TextConfig",
    ),
    "apertus": Family("ApertusForCausalLM"),
    "arcee": Family("ArceeForCausalLM"),
    "bitnet": Family("BitNetForCausalLM"),
    "cohere": Family("CohereForCausalLM", unrotates=False),
    "ernie4_5": Family("Ernie4_5ForCausalLM", unrotates=False),
    "gemma": Family("GemmaForCausalLM", WIDE),
    "glm": Family("GlmForCausalLM", WIDE, unrotates=False),
    "glm4": Family("Glm4ForCausalLM", WIDE, unrotates=False),
    "gpt_neox": Family("GPTNeoXForCausalLM", UNGROUPED),
    "granite": Family("GraniteForCausalLM"),
    "granitemoe": Family("GraniteMoeForCausalLM", EXPERTS),
    "helium": Family("HeliumForCausalLM", {"head_dim": 8}, unrotates=False),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", WIDE, unrotates=False),
    "mixtral": Family("MixtralForCausalLM", EXPERTS),
    "nemotron": Family("NemotronForCausalLM"),
    "olmo": Family("OlmoForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "persimmon": Family("PersimmonForCausalLM", UNGROUPED),
    "phi": Family("PhiForCausalLM"),
    "phimoe": Family("PhimoeForCausalLM", EXPERTS),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**WIDE, **QWEN_EXPERTS}),
    "seed_oss": Family("SeedOssForCausalLM", WIDE),
    "smollm3": Family("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "stablelm": Family("StableLmForCausalLM"),
    "starcoder2": Family("Starcoder2ForCausalLM", {"sliding_window": None}),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", {**WIDE, **EXPERTS}),
    "gpt_oss": Family("GptOssForCausalLM", {**WINDOWS, "layer_types": LOCAL_GLOBAL, **EXPERTS}),
    "jamba": Family("JambaForCausalLM", MAMBA, continues=False),
    "lfm2": Family("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4": Family(
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
    "minimax": Family("MiniMaxForCausalLM", {**WIDE, "layer_types": LINEAR_FULL[::-1], "block_size": 8, **EXPERTS}),
    "qwen3_5": Family("Qwen3_5ForCausalLM", DELTA, config="Qwen3_5TextConfig"),
    "qwen3_next": Family("Qwen3NextForCausalLM", {**DELTA, **QWEN_EXPERTS, "shared_expert_intermediate_size": 32}),
    "bloom": Family("BloomForCausalLM", refused=True),
    "falcon": Family("FalconForCausalLM", refused=True),
    "mpt": Family("MptForCausalLM", refused=True),
}


def family_of(config: Any) -> Family | None:
    """Return the family of a text model's configuration; None: it is not in the table."""
    return FAMILIES.get(config.model_type.removesuffix("_text"))


def build(name: str, device: str = "cpu", **changes: Any) -> Any:
    """Make a tiny random model of a family, with weights large enough for attention to be far from uniform."""
    import transformers

    family = FAMILIES[name]
    config_class = getattr(transformers, family.config or family.model.removesuffix("ForCausalLM") + "Config")
    torch.manual_seed(1)
    model = getattr(transformers, family.model)(config_class(**{**SHAPE, **family.changes, **changes}))
    model.set_attn_implementation("sdpa" if model._supports_sdpa and name != "gemma2" else "eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.25 if parameter.dim() > 1 else 1.0)
    return model.eval().to(device)
