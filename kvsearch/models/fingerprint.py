"""What tells models apart: hashes of the configuration, of a sample of the weights, and of the tokenizer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from pydantic import ValidationError

from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.parsing import describe_validation_error
from kvsearch.models.architecture import describe, find_text_config, name_of
from kvsearch.models.memory import refuse_offloaded
from kvsearch.models.weights import list_effective_tensors
from kvsearch.plan import ModelFingerprint
from kvsearch.plan.saved import MODEL_KEY

# how a model is loaded does not make it another model
VOLATILE = frozenset(
    {
        "_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "dtype", "name_or_path",
        "torch_dtype", "transformers_version", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
        "chunk_size_feed_forward", "quantization_config", "id2label", "label2id", MODEL_KEY,
    }
)  # fmt: skip
WEIGHT_SAMPLES = 64


def compute_fingerprint(
    model: Any, name: str | None = None, revision: str | None = None, weights: bool = True
) -> ModelFingerprint:
    """Identify `model` by content. Weights are sampled (64 values of every tensor, rounded to bfloat16), so that the
    fingerprint costs milliseconds and does not depend on the device, nor on whether the model was loaded in float32 or
    in bfloat16. (Loading in float16 what was not stored so changes small weights, and with them the fingerprint.)
    Of quantised weights codes and scales count, of adapters those that are active; names of wrappers do not.
    Without `weights` the model is no more than its shape, and the hash that of nothing.

    Raises:
        EnvironmentFault: weights are asked for, and some are not on a device; see `refuse_offloaded`.
        IncompatibleError: it has more layers, heads or dimensions than `kvsearch.core.limits` allows, or text in its
            configuration that cannot be written.
    """
    shape = describe(model)
    called = name or name_of(model)
    if weights:
        refuse_offloaded(model, called)
    try:
        return ModelFingerprint(
            name=called,
            model_type=shape.model_type,
            config_sha256=hash_config(find_text_config(model)),
            weights_sha256=hash_weights(model) if weights else hashlib.sha256().hexdigest(),
            revision=revision,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=str(model.dtype).removeprefix("torch."),
        )
    except ValidationError as error:
        raise IncompatibleError(describe_validation_error(error, f"the shape of model {called!r}")) from error
    except UsageError as error:  # text that is none
        raise IncompatibleError(f"the configuration of model {called!r}: {error}") from error


def hash_config(config: Any) -> str:
    """Return the SHA-256 of the configuration without what says only how or where it was loaded."""
    plain = json.loads(config.to_json_string(use_diff=False))
    return hash_json({key: value for key, value in plain.items() if key not in VOLATILE})


@torch.no_grad()
def hash_weights(model: Any) -> str:
    """Return the SHA-256 over the names, shapes and sampled values of all weights; see `list_effective_tensors`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(list_effective_tensors(model), key=lambda pair: pair[0]):
        flat = tensor.reshape(-1)
        if flat.dtype.itemsize == 1:  # codes, and float8, which few devices can index
            flat = flat.view(torch.uint8)
        count = min(WEIGHT_SAMPLES, flat.numel())
        # Evenly over the tensor, so that any other fine-tune shows.
        index = torch.arange(count, device=flat.device) * flat.numel() // max(1, count)
        values = flat[index]
        # Rounded, so that a model loaded in float32 and in bfloat16 is the same one.
        values = values.to(torch.bfloat16).float() if flat.is_floating_point() else values
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + values.cpu().numpy().tobytes())
    return digest.hexdigest()


def hash_tokenizer(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer: its vocabulary and rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any
    if backend is None:
        rules = sorted(tokenizer.get_vocab().items())
    else:  # truncation and padding are those of the last call, and every call sets them anew
        rules = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    known = {
        "class": tokenizer.__class__.__name__, "rules": rules,
        "special": str(sorted(tokenizer.special_tokens_map.items())),
        "chat_template": getattr(tokenizer, "chat_template", None),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
