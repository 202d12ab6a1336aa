"""Export a probe as a network on hidden states, in KVzap's format, which kvpress reads.

Keys before their rotary embedding and values are linear in what enters the attention: k = W_k h + b_k. So is a probe
that looks at these two alone up to its GELUs, and one network of a layer has the probes of all its heads side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from kvsearch.core.errors import IncompatibleError, UsageError, require
from kvsearch.exporters.base import WEIGHTS_FILE, ExportedFiles, ExportInputs, ProfileExporter
from kvsearch.models.architecture import describe, find_attention_modules
from kvsearch.models.loading import MODEL_CONFIG_FILE
from kvsearch.models.weights import read_effective_bias, read_effective_weight
from kvsearch.plan import Profile, canonical_json
from kvsearch.policies.probe import ARRAYS, PROBE_METHOD, SPREAD

HeadMaps = tuple[Tensor, Tensor]  # z = weight h + bias of each head: [Hkv, F, d_model], [Hkv, F]
LINEAR = ("key", "value")  # features that are linear in hidden states
PROJECTIONS = ("k_proj", "v_proj")  # and what makes them
CHANGED = ("k_norm", "k_layernorm", "key_layernorm", "qk_norm", "v_norm")  # of an attention that makes them non-linear


class KvpressKvzap(ProfileExporter):
    """A probe that looks at keys and values for `KVzapPress`: `config.json` and `model.safetensors`.

    Where all heads are linear, so is the surrogate. Else the linear part of a head is two more hidden units, as
    gelu(x) - gelu(-x) = x.
    """

    name: ClassVar[str] = "kvpress-kvzap"
    needs_model: ClassVar[bool] = True

    def export(self, profile: Profile, inputs: ExportInputs) -> ExportedFiles:
        """Make the folder.

        Raises:
            UsageError: the profile is no probe, or one that looks at more; the model was not given.
            IncompatibleError: keys or values of the model are not linear in hidden states, or layers were not fitted.
        """
        metadata = profile.metadata
        features = self._features(profile)
        model = require(inputs.model, "the target is made of weights of the model: give --model")
        modules = find_attention_modules(model)
        if list(metadata.layers) != list(range(metadata.model.layers)):
            raise IncompatibleError(f"target {self.name} is told of all layers, and not all of this model were fitted")
        fits = [  # the regressions of all heads of a layer, [Hkv, ...] fp64
            {name: torch.from_numpy(profile.arrays[name][row].copy()).double() for name in ARRAYS}
            for row in range(len(metadata.layers))
        ]
        entering = describe(model).hidden_size, model.dtype
        heads = [
            _heads(modules[layer], *entering, features, fit) for layer, fit in zip(metadata.layers, fits, strict=True)
        ]
        linear = not any(bool(fit["output"].any()) for fit in fits)
        made = [(_linear if linear else _network)(maps, fit) for maps, fit in zip(heads, fits, strict=True)]
        tensors = {
            f"layers.{layer}.{name}": part.float().contiguous()
            for layer, parts in zip(metadata.layers, made, strict=True)
            for name, part in parts.items()
        }
        config = {
            "model_type": "kvzap", "input_dim": heads[0][0].shape[2], "output_dim": metadata.model.kv_heads,
            "hidden_dim": None if linear else len(made[0]["0.weight"]), "n_modules": len(made),
        }  # fmt: skip
        kind = "linear" if linear else "mlp"
        usage = (
            "from kvpress.presses.kvzap_press import KVzapModel",
            f"press = KVzapPress(compression_ratio=0.8, model_type={kind!r})",
            "press.kvzap_model = KVzapModel.from_pretrained({path!r})",
            f"press.kvzap_model_name = 'nvidia/KVzap-{kind}-' + model.config.name_or_path.split('/')[-1]",
        )
        files = {WEIGHTS_FILE: save(tensors, {"format": "pt"}), MODEL_CONFIG_FILE: canonical_json(config)}
        return ExportedFiles(files, usage, dict.fromkeys(_losses(profile, features, fits)))

    def _features(self, profile: Profile) -> list[str]:
        """Return the features of a probe; UsageError for other rankings, or features not linear in hidden states."""
        metadata = profile.metadata
        if metadata.method != PROBE_METHOD:
            raise UsageError(f"target {self.name} is made of a probe, and this is a {metadata.method} profile")
        stated = metadata.provenance.settings["features"]
        features = list(map(str, stated)) if isinstance(stated, tuple) else [str(stated)]
        more = [name for name in features if name not in (*LINEAR, SPREAD)]
        if more:
            raise UsageError(
                f"target {self.name} needs a probe that looks at keys and values alone, and this one looks at "
                f"{', '.join(more)}, too: calibrate --method probe --features key,value"
            )
        return features


def _heads(module: Any, width: int, dtype: torch.dtype, features: list[str], fit: Mapping[str, Tensor]) -> HeadMaps:
    """Return what is read of a layer, standardised, as a linear map of hidden states; zero where it is no such map.

    Raises:
        IncompatibleError: keys or values are not linear in hidden states.
    """
    projections: list[Any] = [getattr(module, name, None) for name in PROJECTIONS]
    changed = [name for name in CHANGED if getattr(module, name, None) is not None]
    if changed or not all(isinstance(projection, nn.Module) for projection in projections):
        why = f"it has {', '.join(changed)}" if changed else "it has no linear k_proj and v_proj of their own"
        raise IncompatibleError(
            f"keys and values of {type(module).__name__} are not linear in what enters it: {why}; kvsearch itself "
            "runs the probe"
        )
    count = fit["center"].shape[0]
    weight = list[Tensor]()
    bias = list[Tensor]()
    for name in features:
        if name == SPREAD:
            weight.append(torch.zeros(count, 1, width, dtype=torch.float64))
            bias.append(fit["center"][:, sum(part.shape[1] for part in bias)][:, None])
            continue
        place = LINEAR.index(name)
        what = f"{PROJECTIONS[place]} of layer {getattr(module, 'layer_idx', '?')}"
        matrix = read_effective_weight(projections[place], what, width, dtype)
        weight.append(matrix.detach().cpu().double().reshape(count, -1, width))
        offset = weight[-1].new_zeros(count, weight[-1].shape[1])
        added = read_effective_bias(projections[place], width, dtype)
        bias.append(offset if added is None else added.detach().cpu().double().view_as(offset))
    return torch.cat(weight, 1) / fit["scale"][..., None], (torch.cat(bias, 1) - fit["center"]) / fit["scale"]


def _linear(read: HeadMaps, fit: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the linear surrogate of a layer, weight [Hkv, d_model] and bias [Hkv]."""
    weight, bias = read
    return {
        "weight": torch.einsum("hf,hfd->hd", fit["linear"], weight),
        "bias": torch.einsum("hf,hf->h", fit["linear"], bias) + fit["bias"],
    }


def _network(read: HeadMaps, fit: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the network of a layer: the hidden units of all heads side by side, [Hkv * (K + 2)] of them."""
    straight = _linear(read, {**fit, "bias": torch.zeros_like(fit["bias"])})
    inner = torch.einsum("hfk,hfd->hkd", fit["hidden"], read[0])
    inner_bias = torch.einsum("hfk,hf->hk", fit["hidden"], read[1]) + fit["hidden_bias"]
    weight = torch.cat([inner, straight["weight"][:, None], -straight["weight"][:, None]], 1)
    bias = torch.cat([inner_bias, straight["bias"][:, None], -straight["bias"][:, None]], 1)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).expand(len(inner), 2)
    outer = torch.cat([fit["output"], signs], 1)
    side_by_side = torch.eye(len(outer), dtype=outer.dtype)[..., None] * outer  # [Hkv, Hkv, K + 2]
    return {
        "0.weight": weight.flatten(0, 1),
        "0.bias": bias.flatten(),
        "2.weight": side_by_side.flatten(1),
        "2.bias": fit["bias"],
    }


def _losses(profile: Profile, features: list[str], fits: list[dict[str, Tensor]]) -> Iterator[str]:
    """List the features that the surrogate cannot see, and the protection that the press lacks."""
    if SPREAD in features:
        # the other features, which are as wide as a head, share the rest
        wide = (fits[0]["center"].shape[1] - 1) // max(1, len(features) - 1)
        column = wide * features.index(SPREAD)
        even = sum(int((fit["linear"][:, column] != 0).sum()) for fit in fits)
        if even:
            heads = len(fits) * len(fits[0]["bias"])
            yield f"{even} of {heads} heads keep an even spread of entries, and the surrogate cannot see places"
    sinks, recent = (profile.metadata.policy.params.get(name, 0) for name in ("sinks", "protect"))
    if sinks or recent:
        yield f"the press protects neither the first {sinks} nor the last {recent} entries"
