"""KVzap (2026): scores that a small network makes of the hidden states, in the format it is published in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.kernels import constant
from kvsearch.plan.schema import ModelFingerprint
from kvsearch.policies.base import Needs, Observation
from kvsearch.policies.decoding import Step
from kvsearch.policies.fitted import Fitted
from kvsearch.policies.tensors import F, Tensor

MOST_LOG = 60.0  # scores stay finite in fp32


@dataclass(frozen=True)
class Surrogate:
    """The networks of all layers, by the SHA-256 of their file."""

    weights: str

    def __call__(self, hidden: Tensor, layer: int) -> Tensor:
        """Return log scores [B, Hkv, q] fp32 of what enters the attention of a model layer, [B, q, d_model]."""
        steps = _layers(self.weights, hidden.device)[layer]
        if hidden.shape[-1] != steps[0][0].shape[1]:
            raise IncompatibleError(
                f"policy kvzap: its weights read hidden states of {steps[0][0].shape[1]} numbers, and this model's "
                f"have {hidden.shape[-1]}: take those of this model"
            )
        states = F.linear(hidden.float(), *steps[0])
        if len(steps) > 1:
            states = F.linear(F.gelu(states), *steps[1])
        return states.transpose(1, 2)


@dataclass(frozen=True)
class KVzap(Fitted):
    """score[i] = exp(f_l(h_i)), with h_i what enters the attention of layer l at token i, after its normalisation.

    f_l is a linear map or two with a GELU between them, to a log score for every kv head: what KVzip+ would say, fitted
    by its authors. It is read as published: a directory with `model.safetensors` (`layers.0.weight`, or
    `layers.0.0.weight` and `layers.0.2.weight`, with biases).
    The file does not say which model it is for: layers, kv heads and the width of hidden states must be the model's.

    While decoding a new token gets its score when it comes, once, as every entry of the prompt did.
    """

    name: ClassVar[str] = "kvzap"
    source: ClassVar[str] = "KVzap, arXiv 2601.07891; the published weights"
    summary: ClassVar[str] = "exp(f_l(h_i)), f_l a published map or network of hidden states"
    weakness: ClassVar[str] = "weights of another model of the same shape: the format does not name its model"
    made_by: ClassVar[str] = "KVzap's authors"
    published: ClassVar[str | None] = "model.safetensors"

    @classmethod
    def check_weights(cls, digest: str) -> None:
        """Raise UsageError if they do not fit."""
        _layers(digest, "cpu")

    def check_model(self, model: ModelFingerprint) -> None:
        """Raise IncompatibleError if the weights have other layers or kv heads than the model of this fingerprint."""
        layers = _layers(self.weights, "cpu")
        sizes = len(layers), layers[0][-1][0].shape[0]
        if sizes != (model.layers, model.kv_heads):
            raise IncompatibleError(
                f"policy kvzap: its weights are for {sizes[0]} layers of {sizes[1]} kv heads, and {model.name} has "
                f"{model.layers} of {model.kv_heads}: take those of this model"
            )

    def needs(self) -> Needs:
        return Needs(hidden=Surrogate(self.weights))

    def score(self, observation: Observation) -> Tensor:
        """Return the scores, [B, Hkv, T] fp32."""
        return _score(observation.of_hidden(Surrogate(self.weights)))

    def arriving(self, step: Step) -> Tensor:
        if step.hidden is not None:
            return _score(step.hidden[:, None])
        return _score(step.arrived.of_hidden(Surrogate(self.weights)).flatten(0, 1))


def _score(logs: Tensor) -> Tensor:
    return logs.clamp(-MOST_LOG, MOST_LOG).exp()


Steps = tuple[tuple[Tensor, Tensor], ...]  # weight and bias of each linear map


@constant
@lru_cache(maxsize=16)
def _layers(digest: str, device: Any) -> tuple[Steps, ...]:
    """Return the linear maps of every layer, fp32; UsageError if the weights are not here, or not KVzap's."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from kvsearch.plan.saved import read_known_weights

    path, data = read_known_weights(digest)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise UsageError(f"{path} is no complete safetensors file: {error}") from error
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    layers: list[Steps] = []
    while (steps := _maps(tensors, f"layers.{len(layers)}")) is not None:
        layers.append(steps)
    shapes = {tuple(weight.shape for weight, _ in steps) for steps in layers}
    if len(shapes) != 1 or 2 * sum(map(len, layers)) != len(tensors):
        raise UsageError(
            f"{path} has no weights of KVzap: they are layers.0.weight and layers.0.bias, or those of layers.0.0 and "
            "layers.0.2, alike for every layer"
        )
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise UsageError(f"{path}: some of its weights are not finite")
    return tuple(tuple((weight.to(device), bias.to(device)) for weight, bias in steps) for steps in layers)


def _maps(tensors: dict[str, Tensor], name: str) -> Steps | None:
    """Return the linear maps of one layer; None where they are not all there, or do not fit together."""
    parts = ("",) if f"{name}.weight" in tensors else (".0", ".2")
    pairs = [(tensors.get(f"{name}{part}.weight"), tensors.get(f"{name}{part}.bias")) for part in parts]
    steps = tuple((weight, bias) for weight, bias in pairs if weight is not None and bias is not None)
    sound = all(weight.dim() == 2 and bias.shape == weight.shape[:1] for weight, bias in steps)
    if len(steps) < len(parts) or not sound or (len(steps) > 1 and steps[0][0].shape[0] != steps[1][0].shape[1]):
        return None
    return steps
