"""Facts about a decoder model that calibration and the runtime need, and refusals of what cannot work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.errors import IncompatibleError

TESTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder model. `full_layers` are the layers a plan may govern: plain full attention."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    full_layers: tuple[int, ...]
    max_positions: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the decoder (of the text part, if the model has several)."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]


def describe(model: nn.Module) -> Architecture:
    """Read the architecture off a model; IncompatibleError in one line where the runtime cannot serve it."""
    config = text_config(model)
    refuse_unsupported(config, type(model).__name__)
    heads = config.num_attention_heads
    everywhere = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if not full:
        raise IncompatibleError(f"{type(model).__name__} has no full-attention layer: there is nothing to evict")
    return Architecture(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        full_layers=full,
        max_positions=getattr(config, "max_position_embeddings", 0) or 0,
    )


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise IncompatibleError for the architectures whose attention the runtime cannot take over."""
    problem = None
    if getattr(config, "is_encoder_decoder", False):
        problem = "it is an encoder-decoder"
    elif getattr(config, "kv_lora_rank", None):
        problem = "multi-head latent attention compresses keys and values itself"
    elif getattr(config, "num_kv_shared_layers", 0):
        problem = "some of its layers share one KV cache"
    elif getattr(config, "model_type", "") == "gpt_oss":
        problem = "its attention has learned sink logits"
    elif not hasattr(config, "num_attention_heads"):
        problem = "it has no attention heads in its configuration"
    else:
        kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds:
            problem = f"it has layers of kind {', '.join(sorted(kinds))}"
    if problem:
        raise IncompatibleError(f"{name} is not supported: {problem}; tested families: {', '.join(TESTED)}")


def require_plain_rotary(model: nn.Module, what: str) -> None:
    """Refuse rotary embeddings that `unrotate` cannot undo: interleaved ones, and tables that depend on the length."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("full_attention", parameters).get("rope_type", "default")
    if config.model_type not in TESTED or kind in ("dynamic", "longrope"):
        raise IncompatibleError(
            f"{what} turns queries back to position 0, which is not verified for {config.model_type} with {kind} "
            f"rotary embedding: use another policy; verified families: {', '.join(TESTED)}"
        )


def decoder(model: nn.Module) -> nn.Module:
    """Return the module that owns `layers` and `rotary_emb`."""
    found = [m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "rotary_emb")]
    if not found:
        raise IncompatibleError(f"{type(model).__name__}: no decoder with layers and rotary embedding found")
    return found[0]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention module of every decoder layer."""
    layers: Any = decoder(model).layers
    return [layer.self_attn for layer in layers]


def rotary(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Make cosine and sine tables of full-attention layers: positions [N] -> two tensors [N, rotary dims], fp32."""
    module: Any = decoder(model).rotary_emb
    per_type = hasattr(module, "full_attention_inv_freq")

    @torch.no_grad()
    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        probe = torch.empty(0, dtype=torch.float32, device=positions.device)
        extra = {"layer_type": "full_attention"} if per_type else {}
        cos, sin = module(probe, position_ids=positions[None], **extra)
        # on several devices accelerate runs this module, and leaves its result, where its weights are
        return cos[0].to(positions.device), sin[0].to(positions.device)

    return tables


def unrotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotary embedding of `states` [B, H, N, D] (fp32) given the tables [B or 1, N, rotary dims]."""
    cos, sin = cos[:, None], sin[:, None]
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    left, right = turned.chunk(2, dim=-1)
    half_turn = torch.cat((-right, left), dim=-1)
    scale = cos.square() + sin.square()
    return torch.cat(((turned * cos - half_turn * sin) / scale, rest), dim=-1)


def output_weight(module: nn.Module, heads: int) -> Tensor:
    """Return W_O of one attention layer per query head, [Hq, Dv, d_model] fp32."""
    weight: Tensor = module.o_proj.weight  # type: ignore[union-attr, assignment]
    return weight.float().reshape(weight.shape[0], heads, -1).permute(1, 2, 0)
