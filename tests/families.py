"""Tiny random models of every tested family, and helpers to run them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 16, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 16, "layer_types": LOCAL_GLOBAL, "query_pre_attn_scalar": 16},
    ),
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def build(family: str, device: str = "cpu", **changes: Any) -> Any:
    """A random model with weights large enough for attention to be far from uniform."""
    model_class, config_class, extra = FAMILIES[family]
    torch.manual_seed(1)
    config = config_class(**{**SHAPE, **extra, **changes})
    model = model_class(config)
    model.set_attn_implementation("eager" if family == "gemma2" else "sdpa")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.eval().to(device)


def prompts(batch: int, length: int, pads: int = 0, device: str = "cpu", seed: int = 0) -> tuple[Any, Any]:
    """Random ids [batch, length] and their attention mask; the first row starts with `pads` padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return ids.to(device), mask.to(device)
