"""Models by their shape alone, with random weights: what they cost can be measured without a download."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.core.naming import require_known
from kvsearch.models.loading import LoadedModel, require_device
from kvsearch.models.memory import find_best_device, measure_free_bytes

if TYPE_CHECKING:
    import torch

LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
# the configurations that the models are published with
SHAPES: dict[str, Mapping[str, Any]] = {
    "llama-3.1-8b": LLAMA,
    "llama-3.1-70b": {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "qwen3-8b": {
        **LLAMA, "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip


def make_bare_model(shape: str, layers: int | None = None, dtype: str = "auto") -> Any:
    """Make a model of a shape, or its first `layers`, on the meta device: without memory, to count sizes only.

    Raises:
        UsageError: there is no such shape, or it has fewer layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    require_known("shape", shape, list(SHAPES))
    settings = dict(SHAPES[shape])
    if layers is not None:
        if not 1 <= layers <= settings["num_hidden_layers"]:
            raise UsageError(f"{shape} has {settings['num_hidden_layers']} layers: take 1 to that many")
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**settings, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        )


def make_random_model(
    shape: str, layers: int | None = None, device: str = "auto", dtype: str = "auto", *, weights: bool = True
) -> LoadedModel:
    """Return a model of a shape, or of its first `layers`, with random weights (bfloat16 unless told); no tokenizer.

    Without `weights` it takes no memory, see `make_bare_model`.

    Raises:
        UsageError: there is no such shape, or it has fewer layers.
        EnvironmentFault: its weights do not fit into memory, or there is no such device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kvsearch.models.fingerprint import compute_fingerprint

    model = make_bare_model(shape, layers, dtype)
    place = find_device(device)
    wanted = sum(weight.nbytes for weight in model.parameters())
    if wanted > (free := measure_free_bytes(place)):
        raise EnvironmentFault(
            f"{shape} takes {wanted / 1e9:.1f} GB for its weights and {place} has {free / 1e9:.1f} GB free: measure a "
            "part of it with --layers, or another shape"
        )
    name = shape if layers is None else f"{shape}, {layers} layers"
    if weights:
        torch.manual_seed(0)
        with place:
            model = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    return LoadedModel(name, model.eval(), None, compute_fingerprint(model, name, weights=weights))


def find_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is a GPU where there is one. EnvironmentFault if there is none."""
    import torch

    name = find_best_device() if name == "auto" else name
    require_device(name)
    return torch.device(name)
