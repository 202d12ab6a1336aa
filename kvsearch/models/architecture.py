"""Facts about a decoder model that calibration and the runtime need, and refusals of what cannot work."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.core.errors import IncompatibleError, KvsearchWarning
from kvsearch.models.weights import read_effective_weight

# families, by the model_type of their configuration without "_text" at the end, whose queries can be turned back to
# position 0, which some policies need: no interleaved rotary embedding, and no norm with weights behind it
UNROTATED = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "apertus", "arcee", "bitnet", "gemma",
    "gpt_neox", "granite", "granitemoe", "mixtral", "nemotron", "olmo", "olmo2", "persimmon", "phi", "phimoe",
    "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "minimax_m2", "gpt_oss", "jamba",
    "lfm2", "llama4", "minimax", "qwen3_5", "qwen3_next",
)  # fmt: skip
# families whose code in transformers does not go on from a prompt with several tokens at once as with one by one
FORGETFUL = ("jamba",)


def find_family(config: Any) -> str:
    """Return the family of a text model's configuration."""
    return str(config.model_type).removesuffix("_text")


FULL_ATTENTION = "full_attention"
LEFT_ALONE = {  # kinds of layers that keep the cache transformers gives them, in words
    "sliding_attention": "sliding window", "chunked_attention": "attention in chunks",
    "linear_attention": "linear attention", "conv": "convolution", "moe": "experts alone", "mlp": "MLP alone",
}  # fmt: skip
FORMER_NAMES = {"attention": FULL_ATTENTION, "mamba": "linear_attention"}  # of kinds, before transformers 5.20
ATTENTION_NAMES = ("self_attn", "attention")  # what transformers calls the attention of a decoder layer
OUTPUT_NAMES = ("o_proj", "dense", "out_proj")  # and its output projection
ALIBI = ("bloom", "mpt")  # families without a setting that says so


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder model. `full_layers` are the layers a plan may govern: plain full attention.

    `kinds` has the kind of every layer, by the names of transformers. Layers keep their index in the model.
    """

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    full_layers: tuple[int, ...]
    max_positions: int
    kinds: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


def find_text_config(model: nn.Module) -> Any:
    """Return the configuration of the decoder (of the text part, if the model has several)."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]


def name_of(model: Any) -> str:
    """Return the name of a model in its configuration, or else its class."""
    return getattr(model.config, "_name_or_path", "") or find_class_name(model)


def is_wrapper(model: Any) -> bool:
    """Tell whether a model is PEFT's wrapper, whose generate() is that of the model within."""
    return hasattr(model, "get_base_model")


def unwrap(model: Any) -> Any:
    """Return the model within PEFT's wrapper, or the model itself where it has none around it."""
    return model.get_base_model() if is_wrapper(model) else model


def find_class_name(model: Any) -> str:
    """Return the name of a model's class, for messages; that of the model within where PEFT's wrapper is around it."""
    return type(unwrap(model)).__name__


def describe(model: nn.Module) -> Architecture:
    """Read the architecture off a model; IncompatibleError in one line where the runtime cannot serve it.

    Examples:
        >>> from kvsearch.models.loading import load
        >>> shape = describe(load("bundled").model)
        >>> shape.full_layers, shape.kv_heads, shape.group
        ((0, 1, 2, 3, 4, 5), 4, 2)
    """
    config = find_text_config(model)
    if problem := find_unsupported(model):
        raise IncompatibleError(f"{find_class_name(model)} is not supported: {problem} (docs/models.md lists what is)")
    heads = config.num_attention_heads
    kinds = list_layer_kinds(config)
    full = tuple(i for i, kind in enumerate(kinds) if kind == FULL_ATTENTION)
    if not full:
        raise IncompatibleError(f"{find_class_name(model)} has no full-attention layer: there is nothing to evict")
    return Architecture(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        full_layers=full,
        max_positions=getattr(config, "max_position_embeddings", 0) or 0,
        kinds=kinds,
    )


def list_layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kind of every layer, by the names of transformers."""
    # Configurations without `layer_types` have one kind in all layers.
    everywhere = "sliding_attention" if getattr(config, "sliding_window", None) else FULL_ATTENTION
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    return tuple(FORMER_NAMES.get(kind, kind) for kind in kinds)


def find_unsupported(model: nn.Module) -> str | None:
    """Return why the runtime cannot take over a model's attention; None if it can."""
    config = find_text_config(model)
    problem = None
    if getattr(config, "is_encoder_decoder", False):
        problem = "it is an encoder-decoder"
    elif getattr(config, "kv_lora_rank", None):
        problem = "multi-head latent attention compresses keys and values itself"
    elif getattr(config, "num_kv_shared_layers", 0):
        problem = "some of its layers share one KV cache"
    elif any(getattr(adapter, "is_prompt_learning", False) for adapter in getattr(model, "peft_config", {}).values()):
        problem = "its adapter puts virtual tokens in front of every prompt, which a plan does not know"
    elif not hasattr(config, "num_attention_heads"):
        problem = "it has no attention heads in its configuration"
    elif not any(hasattr(sys.modules[type(part).__module__], "ALL_ATTENTION_FUNCTIONS") for part in model.modules()):
        problem = "its code computes attention itself"
        if getattr(config, "alibi", config.model_type in ALIBI):
            problem += ", with a bias for the distance of tokens (ALiBi) in place of a rotary embedding,"
        problem += " and never asks transformers' registry of attention functions for another"
    elif unknown := sorted(set(list_layer_kinds(config)) - {FULL_ATTENTION, *LEFT_ALONE}):
        problem = f"it has layers of kind {', '.join(unknown)}"
    return problem


def require_continuation(module: nn.Module, tokens: int) -> None:
    """Refuse several tokens at once after a prompt where transformers' code for the model computes them wrongly.

    `module` is an attention layer; its neighbours forget their running state, and nothing would tell.
    """
    config: Any = getattr(module, "config", None)
    if tokens > 1 and config is not None and find_family(config) in FORGETFUL:
        raise IncompatibleError(
            f"transformers' code for {config.model_type} forgets its running state when several tokens follow a prompt "
            "at once: put the question into the prompt (--protocol question-aware), or feed tokens one by one"
        )


def require_plain_rotary(model: nn.Module, what: str) -> None:
    """Refuse rotary embeddings that `unrotate` cannot undo: interleaved ones, and tables that depend on the length."""
    config = find_text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get(FULL_ATTENTION, parameters).get("rope_type", "default")
    if find_family(config) not in UNROTATED or find_rotary_switch(model) is not None:
        raise IncompatibleError(
            f"{what} turns queries back to position 0, which is not verified for {config.model_type} with {kind} "
            f"rotary embedding: use another policy; verified families: {', '.join(UNROTATED)}"
        )


def find_decoder(model: nn.Module) -> nn.Module:
    """Return the module that owns the decoder's `layers`."""
    count = find_text_config(model).num_hidden_layers
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == count and _find_attention(layers) is not None:
            return module
    raise IncompatibleError(f"{find_class_name(model)}: no decoder with layers of attention found")


def _find_attention(layers: Iterable[nn.Module]) -> nn.Module | None:
    modules = (getattr(layer, name, None) for layer in layers for name in ATTENTION_NAMES)
    return next((module for module in modules if module is not None), None)


def find_attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the attention module of every layer that has one, by its index."""
    layers: Any = find_decoder(model).layers
    modules = {index: _find_attention([layer]) for index, layer in enumerate(layers)}
    return {index: module for index, module in modules.items() if module is not None}


def find_rotary_module(model: nn.Module) -> Any:
    """Find the module that makes all layers' rotary cosines and sines; None if the model has no such module."""
    return getattr(find_decoder(model), "rotary_emb", None)


@dataclass(frozen=True)
class RotarySwitch:
    """Where the rotary factors of a model change with the length of a sequence: beyond `length` tokens.

    transformers rotates what comes in one forward pass by the factors of the highest position in it. Keys that are
    cached keep those that they were read with, so that queries of another length do not fit them.
    """

    length: int
    settles: bool  # beyond it factors are the same for every length (LongRoPE); else each has its own (dynamic NTK)

    @property
    def kind(self) -> str:
        return "LongRoPE" if self.settles else "dynamic NTK"

    def parts(self, read: int, final: int) -> bool:
        """Tell whether the first `read` tokens of a sequence of `final` ones have other factors than its last."""
        return final > self.length and not (self.settles and read > self.length)


def find_rotary_switch(model: nn.Module) -> RotarySwitch | None:
    """Find the length beyond which some layers use other rotary factors; None if they never change."""
    rotary = find_rotary_module(model)
    kinds = getattr(rotary, "rope_type", None)
    parameters_by_layer = getattr(getattr(rotary, "config", None), "rope_parameters", None) or {}
    switches = []
    for layer, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
        if kind == "longrope":
            parameters = parameters_by_layer if layer is None else parameters_by_layer[layer]
            switches.append(RotarySwitch(int(parameters["original_max_position_embeddings"]), True))
        elif "dynamic" in str(kind):
            switches.append(RotarySwitch(int(rotary.original_max_seq_len), False))
    return min(switches, key=lambda switch: switch.length, default=None)


def require_same_rotary(model: nn.Module, read: Sequence[int] | Tensor, later: int = 0, place: str = "") -> None:
    """Refuse a batch of sequences whose rotary factors would change while it is in a cache.

    Args:
        model: the model.
        read: [B] tokens of each sequence, padding not counted, that are read in the first forward pass.
        later: the most tokens that the model reads of them after that.
        place: where the sequences come from in a set of tasks, for the message, which then names --max-length, too.

    Raises:
        IncompatibleError: a sequence passes the length from which the model has other factors (see `RotarySwitch`), or
            sequences on both sides of it share the batch.
    """
    switch = find_rotary_switch(model)
    if switch is None:
        return
    lengths = [int(length) for length in read]
    shortest = min(lengths)
    longest = max(lengths)
    final_length = longest + later
    if final_length <= switch.length or (switch.settles and shortest > switch.length):
        return
    where, advice = (f"{place}: ", " (--max-length cuts contexts)") if place else ("", "")
    problem = (
        f"{where}{find_class_name(model)} has other rotary factors beyond {switch.length:,} tokens "
        f"({switch.kind}), and "
        "cached keys keep those that they were read with"
    )
    if not switch.settles or longest <= switch.length:
        beyond = f", or begin with more than {switch.length:,}" if switch.settles else ""
        raise IncompatibleError(
            f"{problem}: a sequence that begins with {longest:,} may have {switch.length:,}, and this one may come to "
            f"{final_length:,}; shorten prompt or reply by {final_length - switch.length:,}{beyond}{advice}"
        )
    raise IncompatibleError(
        f"{problem}: sequences of {shortest:,} and of {longest:,} tokens cannot share a batch; ask them apart "
        f"(a batch of 1){advice}"
    )


def find_rotary_limit(model: nn.Module, tokens: int) -> int:
    """Return the length up to which a sequence keeps the rotary factors of its first `tokens`.

    It is no more than the model has positions for; 0: the model names no limit.
    """
    switch = find_rotary_switch(model)
    positions = describe(model).max_positions
    if switch is None or (switch.settles and tokens > switch.length):
        return positions
    return min(positions or switch.length, switch.length)


def is_beyond_switch(model: nn.Module, tokens: int) -> bool:
    """Tell whether a sequence of so many tokens has other rotary factors than short ones: no batch may have both."""
    switch = find_rotary_switch(model)
    return switch is not None and tokens > switch.length


@contextmanager
def rotate_as_length(model: nn.Module, tokens: int) -> Iterator[None]:
    """Rotate all chunks of a sequence with the factors of its final length, `tokens`, as if read in one pass.

    Adds the last position to every call of the rotary embedding, which picks its factors by the largest one, and
    removes that row of cosines and sines.
    """
    if not is_beyond_switch(model, tokens):
        yield
        return

    def ask_for_last(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        states, positions = (*args, *(given.pop(name) for name in ("x", "position_ids") if name in given))[:2]
        # The module picks its factors by the largest position of a call.
        last = torch.full_like(positions[..., :1], tokens - 1)
        return (states, torch.cat([positions, last], -1), *args[2:]), given

    def drop_last(_: nn.Module, __: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = tables
        return cos[..., :-1, :], sin[..., :-1, :]

    rotary = find_rotary_module(model)
    handles = [rotary.register_forward_pre_hook(ask_for_last, with_kwargs=True)]
    handles.append(rotary.register_forward_hook(drop_last))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RotaryTables:
    """Cosines and sines of a full-attention layer, by the rotary embedding of its model; some layers do not rotate."""

    def __init__(self, model: nn.Module, layer: int) -> None:
        rotates = getattr(find_attention_modules(model)[layer], "use_rope", True)
        self.module: Any = find_rotary_module(model) if rotates else None

    @torch.no_grad()
    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors [N, rotary dims] fp32 for positions [N]."""
        if self.module is None:
            cos = torch.ones(len(positions), 2, device=positions.device)
            return cos, torch.zeros_like(cos)
        per_type = hasattr(self.module, f"{FULL_ATTENTION}_inv_freq")
        probe = torch.empty(0, dtype=torch.float32, device=positions.device)
        extra = {"layer_type": FULL_ATTENTION} if per_type else {}
        cos, sin = self.module(probe, position_ids=positions[None], **extra)
        if not per_type and cos.shape[-1] == self.module.inv_freq.shape[-1]:  # each angle once
            cos = torch.cat((cos, cos), -1)
            sin = torch.cat((sin, sin), -1)
        # on several devices accelerate runs this module, and leaves its result, where its weights are
        return cos[0].to(positions.device), sin[0].to(positions.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryTables:
        return self  # it is the model's


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to `states` [B, H, N, D] (fp32) given the tables [B or 1, N, rotary dims]."""
    width = cos.shape[-1]
    turned = states[..., :width]
    left, right = turned.chunk(2, dim=-1)
    half_turn = torch.cat((-right, left), dim=-1)
    return torch.cat((turned * cos[:, None] + half_turn * sin[:, None], states[..., width:]), dim=-1)


def unrotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotary embedding of `states` [B, H, N, D] (fp32) given the tables [B or 1, N, rotary dims]."""
    # Not 1 where the embedding scales its tables (YaRN, LongRoPE): the inverse rotation divides by it.
    scale = cos.square() + sin.square()
    return rotate(states, cos / scale, -sin / scale)


def find_output_projection(module: nn.Module) -> Any:
    """Return the linear map W_O at the end of one attention layer."""
    return getattr(module, _find_output_name(module))


def _find_output_name(module: nn.Module) -> str:
    for name in OUTPUT_NAMES:
        if isinstance(getattr(module, name, None), nn.Module):
            return name
    raise IncompatibleError(f"{type(module).__name__} has no output projection under a name that is known here")


def read_output_weight(module: nn.Module, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return W_O of one attention layer per query head, [Hq, Dv, d_model] fp32.

    `dtype` is that of attention outputs. Errors as for `read_effective_weight`.
    """
    name = _find_output_name(module)
    projection: Any = getattr(module, name)
    what = f"{name} of layer {getattr(module, 'layer_idx', '?')}"
    inputs: int = getattr(projection, "in_features", None) or heads * getattr(module, "head_dim", 0)
    weight = read_effective_weight(projection, what, inputs, dtype)
    return weight.float().reshape(weight.shape[0], heads, -1).permute(1, 2, 0)


def check_length(model: Any, tokens: int) -> None:
    """Raise an IncompatibleError if a prompt of so many tokens leaves the model no position for a reply."""
    limit = describe(model).max_positions
    if limit and tokens >= limit:
        raise IncompatibleError(f"a context has {tokens} tokens, the model takes at most {limit}: shorten it")


def warn_beyond(model: Any, tokens: int) -> None:
    """Warn if a sequence of so many tokens, evicted ones counted, is longer than the model has positions for."""
    limit = describe(model).max_positions
    if limit and tokens > limit:
        problem = f"{tokens} tokens have passed, evicted ones counted, and the model has positions for {limit}"
        warnings.warn(f"{problem}: what it says beyond them is not to be relied on", KvsearchWarning, stacklevel=3)
