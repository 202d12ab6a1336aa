"""Prefilled samples of a bank: keys and values of every prompt, sorted by rank inside each head, and their store.

One dense pass over a prompt serves every candidate; what a pass needs of the samples is put side by side again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache

from kvsearch.core.errors import EnvironmentFault, IncompatibleError, UsageError
from kvsearch.core.parsing import describe_fault
from kvsearch.models.architecture import FULL_ATTENTION, RotaryTables, describe
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.checks import DeferredCheck, require_finite
from kvsearch.runtime.attention import require_attention
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.collector import watch_hidden_states
from kvsearch.runtime.observe import PromptLayer
from kvsearch.runtime.stock import CACHE, make_stock_layers

NamedTensors = Mapping[str, Tensor]
Choices = tuple[Policy, ...]  # that a layer may have
Rankings = Mapping[int, Choices]
ChoiceStates = list[tuple[Tensor, Tensor]]  # keys and values [Hkv, N, D] of a layer, for each of its policies


def prefill(model: Any, policies: Rankings, ids: Tensor, cap: int) -> tuple[list[ChoiceStates], Tensor]:
    """Prefill token ids [T]; return the kept keys and values by model layer, and the last logits [V] fp32.

    The best `cap` entries of a full-attention layer are sorted by rank, once for each of its policies; sliding-window
    layers keep their window in the order of the tokens. The model must run the attention "kvsearch".
    """
    require_attention("reading prompts for a search", model.config._attn_implementation)

    def best(prompt: Observation) -> list[tuple[Tensor, Tensor]]:
        kept_states = []
        for policy in policies[prompt.layer]:
            # Sorted by rank, so that what a budget keeps is the first entries, a view.
            order = rank_under(policy, prompt).long().argsort(-1)[..., :cap, None]
            kept_states.append((prompt.keys.take_along_dim(order, 2), prompt.values.take_along_dim(order, 2)))
        checks.extend(prompt.checks or ())
        return kept_states

    checks: list[DeferredCheck] = []
    watch_hidden_states(model, (policy.needs() for some in policies.values() for policy in some))
    layers = make_stock_layers(model)
    for index, some in policies.items():
        layers[index] = PromptLayer(index, [policy.needs() for policy in some], RotaryTables(model, index), best)
    with torch.no_grad():
        output = model(input_ids=ids[None].to(model.device), logits_to_keep=1, **{CACHE: Cache(layers=layers)})
    # Looked at after the pass: the device is waited for once.
    require_finite(checks)
    # Windows are not ranked: they are stored as transformers' own cache holds them.
    states = [[(layer.keys, layer.values)] if layer.is_sliding else layer.noted for layer in layers]
    kept = [[(keys[0], values[0]) for keys, values in some] for some in states]
    return kept, output.logits[0, -1].float()


def find_windows(model: Any) -> dict[int, int]:
    """Return the sliding windows of a model, in tokens, by layer."""
    return {index: layer.sliding_window for index, layer in enumerate(make_stock_layers(model)) if layer.is_sliding}


def resolve_policies(model: Any, base: Policy | Mapping[int, Policy | Sequence[Policy]]) -> dict[int, Choices]:
    """Resolve the policies that rank each full-attention layer, ascending: one for all, or one or several per layer.

    Raises:
        UsageError: what is kept at one budget is not a part of what is kept at a larger one, or a layer has no policy.
        IncompatibleError: a policy does not suit the model.
    """
    shape = describe(model)
    layers = shape.full_layers
    if odd := sorted(set(shape.kinds) - {FULL_ATTENTION, "sliding_attention"}):
        raise IncompatibleError(
            f"{type(model).__name__} has layers of kind {', '.join(odd)}, for which prompts cannot be stored and "
            "shared by candidates: a search needs a model of full and sliding-window attention"
        )
    policy_of_layer = dict.fromkeys(layers, base) if isinstance(base, Policy) else base
    policies = {
        layer: (given_policy,) if isinstance(given_policy, Policy) else tuple(given_policy)
        for layer, given_policy in policy_of_layer.items()
    }
    if odd_layers := sorted(set(policies) ^ set(layers)):
        raise UsageError(f"layers {odd_layers}: a search needs a policy in every full-attention layer, and in no other")
    for layer, choices in policies.items():
        for policy in choices:  # what it keeps at a budget must be the best of one order
            if policy.merges_prompt:
                raise UsageError(
                    f"layer {layer}: policy {policy.name} merges what it evicts into what it keeps, so every budget "
                    "has other keys and values and nothing can be shared: search with another policy"
                )
            # Policies may decide this by the budget, so some of every size are tried.
            if any(policy.keeps_all(2**power, 2**31) for power in range(31)):
                raise UsageError(
                    f"layer {layer}: policy {policy.name} never evicts some heads, whatever their budget, so there is "
                    "nothing to search: use another policy"
                )
    check_rotary(model, {policy for choices in policies.values() for policy in choices})
    return {layer: policies[layer] for layer in layers}


class SampleStore:
    """Stores named groups of tensors, at most `limit` bytes of them on their own device.

    All others go to host memory if it comes from a GPU, else to files in a temporary folder, which are deleted when the
    store is closed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0  # held where they were put
        self._held: dict[str, tuple[NamedTensors | Path, dict[str, torch.device]]] = {}  # with the devices they are of
        self._temporary: TemporaryDirectory[str] | None = None

    def put(self, name: str, tensors: NamedTensors) -> None:
        """Store contiguous tensors under a new name; EnvironmentFault if a file cannot be written."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        devices = {key: tensor.device for key, tensor in tensors.items()}
        if self.nbytes + size <= self.limit:
            self._held[name] = (dict(tensors), devices)
            self.nbytes += size
        else:
            self._held[name] = (self._spill(tensors), devices)

    def get(self, name: str, widths: Mapping[str, int]) -> dict[str, Tensor]:
        """Return tensors [H, N, ...] of a group, the first `widths` of N columns, on the devices they came from."""
        held, devices = self._held[name]
        if not isinstance(held, Path):
            return {key: held[key][:, :width].to(devices[key]) for key, width in widths.items()}
        with safe_open(held, framework="pt") as file:
            return {key: file.get_slice(key)[:, :width].to(devices[key]) for key, width in widths.items()}

    def close(self) -> None:
        """Drop all tensors and delete the files."""
        self._held = {}
        self.nbytes = 0
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _spill(self, tensors: NamedTensors) -> NamedTensors | Path:
        # From a GPU host memory is the next place; where that is the memory that ran out, a file is.
        host = {key: tensor.cpu() for key, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            return host
        try:
            if self._temporary is None:
                self._temporary = TemporaryDirectory(prefix="kvsearch-bank-")
            path = Path(self._temporary.name) / f"sample-{len(self._held)}.safetensors"
            save_file(host, path)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(
                f"cannot keep prompts in the temporary folder: {describe_fault(error)}; raise the memory limit, or "
                "free space"
            ) from error
        return path


def drop_unused_memory(states: Tensor) -> Tensor:
    """Copy a view so that the memory of the rest can be freed."""
    # A slice keeps all of its tensor alive.
    if states.untyped_storage().nbytes() == states.nbytes:
        return states
    return states.clone(memory_format=torch.contiguous_format)
