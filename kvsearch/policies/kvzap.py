"""KVzap (2026): scores that a small network makes of the hidden states, in the format it is published in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.kernels.compiled import constant
from kvsearch.plan.fingerprint import ModelFingerprint
from kvsearch.plan.parsing import read_json
from kvsearch.policies.base import Needs, Observation
from kvsearch.policies.decoding import Step
from kvsearch.policies.fitted import Fitted
from kvsearch.policies.tensors import F, Tensor

CONFIG = "config.json"
SIZES = ("input_dim", "hidden_dim", "output_dim", "n_modules")  # hidden_dim: null where layers are linear
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
    by its authors. It is read as published: a directory with `config.json` (input_dim, hidden_dim, output_dim,
    n_modules) and `model.safetensors` (`layers.0.weight`, or `layers.0.0.weight` and `layers.0.2.weight`, with biases).
    The file does not say which model it is for: layers, kv heads and the width of hidden states must be the model's.

    While decoding a new token gets its score when it comes, once, as every entry of the prompt did.
    """

    name: ClassVar[str] = "kvzap"
    source: ClassVar[str] = "KVzap, arXiv 2601.07891; the published weights"
    made_by: ClassVar[str] = "KVzap's authors"
    published: ClassVar[str | None] = "model.safetensors"

    @classmethod
    def check_weights(cls, digest: str) -> None:
        """See `Fitted.check_weights`; a configuration beside the file must agree with it."""
        _layers(digest, "cpu")

    def check_model(self, model: ModelFingerprint) -> None:
        """Raise IncompatibleError if the weights have other layers or kv heads than the model of this fingerprint."""
        found = _layers(self.weights, "cpu")
        sizes = len(found), found[0][-1][0].shape[0]
        if sizes != (model.layers, model.kv_heads):
            raise IncompatibleError(
                f"policy kvzap: its weights are for {sizes[0]} layers of {sizes[1]} kv heads, and {model.name} has "
                f"{model.layers} of {model.kv_heads}: take those of this model"
            )

    @property
    def surrogate(self) -> Surrogate:
        """What is made of hidden states."""
        return Surrogate(self.weights)

    def fitted_needs(self) -> Needs:
        """See `Fitted.fitted_needs`."""
        return Needs(hidden=self.surrogate)

    def fitted_score(self, observation: Observation) -> Tensor:
        """Return the scores, [B, Hkv, T] fp32."""
        return _score(observation.of_hidden(self.surrogate))

    def arriving(self, step: Step) -> Tensor:
        """See `Fitted.arriving`."""
        hidden = step.arrived.of_hidden(self.surrogate).flatten(0, 1) if step.hidden is None else step.hidden[:, None]
        return _score(hidden)


def _score(logs: Tensor) -> Tensor:
    return logs.clamp(-MOST_LOG, MOST_LOG).exp()


Steps = tuple[tuple[Tensor, Tensor], ...]  # weight and bias of each linear map


@constant
def _layers(digest: str, device: Any) -> tuple[Steps, ...]:
    """Return the linear maps of every layer, as `_read` does, on a device; compiled code has them for a constant."""
    return _read(digest, device)


@lru_cache(maxsize=4)
def _read(digest: str, device: Any) -> tuple[Steps, ...]:
    """Return the linear maps of every layer, fp32; UsageError if the weights are not here, or not KVzap's."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from kvsearch.plan.weights import known_weights

    path, data = known_weights(digest)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise UsageError(f"{path} is no complete safetensors file: {error}") from error
    found: list[Steps] = []
    while (steps := _maps(tensors, f"layers.{len(found)}")) is not None:
        found.append(steps)
    used = 2 * sum(map(len, found))
    if not found or used != len(tensors) or len({_shapes(steps) for steps in found}) > 1:
        raise UsageError(
            f"{path} has no weights of KVzap: they are layers.0.weight and layers.0.bias, or those of layers.0.0 and "
            "layers.0.2, alike for every layer"
        )
    wrong = next((part.dtype for part in tensors.values() if not part.is_floating_point()), None)
    if wrong is not None:
        raise UsageError(f"{path}: some of its weights are of type {wrong}, not floating-point numbers")
    found = [tuple((weight.float(), bias.float()) for weight, bias in steps) for steps in found]
    if not all(bool(part.isfinite().all()) for steps in found for pair in steps for part in pair):
        raise UsageError(f"{path}: some of its weights are not finite")
    _check_config(path, found)
    return tuple(tuple((weight.to(device), bias.to(device)) for weight, bias in steps) for steps in found)


def _maps(tensors: dict[str, Tensor], name: str) -> Steps | None:
    """Return the linear maps of one layer; None where they are not all there, or do not fit together."""
    parts = ("",) if f"{name}.weight" in tensors else (".0", ".2")
    pairs = [(tensors.get(f"{name}{part}.weight"), tensors.get(f"{name}{part}.bias")) for part in parts]
    steps = tuple((weight, bias) for weight, bias in pairs if weight is not None and bias is not None)
    sound = all(weight.dim() == 2 and bias.shape == weight.shape[:1] for weight, bias in steps)
    if len(steps) < len(parts) or not sound or (len(steps) > 1 and steps[0][0].shape[0] != steps[1][0].shape[1]):
        return None
    return steps


def _shapes(steps: Steps) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(weight.shape) for weight, _ in steps)


def _check_config(path: Path, found: list[Steps]) -> None:
    """Raise a UsageError if a configuration beside the weights says something else."""
    config = path.parent / CONFIG
    if not config.is_file():
        return  # beside a plan there is none: the shapes say it all
    stated = read_json(config)
    steps = found[0]
    hidden = steps[0][0].shape[0] if len(steps) > 1 else None
    sizes = dict(zip(SIZES, (steps[0][0].shape[1], hidden, steps[-1][0].shape[0], len(found)), strict=True))
    if not isinstance(stated, dict) or any(stated.get(key) != size for key, size in sizes.items()):
        told = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise UsageError(f"{config} does not go with {path.name}, which has {told}: take both from one place")
