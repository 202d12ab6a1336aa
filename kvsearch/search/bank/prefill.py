"""The one dense pass over a prompt that serves every candidate: keys and values sorted by rank inside each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe, rotary, text_config
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.runtime import Program
from kvsearch.runtime.cache import check_rotary, stock_layers
from kvsearch.runtime.layer import EvictingLayer


class RankingLayer(EvictingLayer):
    """Sorts the prompt by rank inside each head once its dense attention is done."""

    def __init__(self, index: int, policy: Policy, model: Any, cap: int | None) -> None:
        self.policy, self.cap = policy, cap
        self.sorted: tuple[Tensor, Tensor] | None = None
        config = text_config(model)
        super().__init__(index, None, None, lambda: str(config._attn_implementation), rotary(model))

    def needs(self) -> list[Needs]:
        """What the policy needs."""
        return [self.policy.needs()]

    def conclude(self, observation: Observation) -> None:
        """Keep the best `cap` entries of every head, best first."""
        ranks = rank_under(self.policy, observation)
        order = ranks.long().argsort(-1)[..., : self.cap, None]
        keys, values = observation.keys, observation.values
        self.sorted = (keys.take_along_dim(order, 2), values.take_along_dim(order, 2))


@dataclass(frozen=True, eq=False)
class Prefilled:
    """One prompt of `length` tokens: keys and values [Hkv, N, D] of every model layer, and its last logits [V] fp32.

    Full-attention layers are sorted by rank, sliding-window layers hold their window in the order of the tokens.
    """

    length: int
    layers: list[tuple[Tensor, Tensor]]
    logits: Tensor


def prefill(model: Any, policies: Mapping[int, Policy], ids: Tensor, cap: int | None) -> Prefilled:
    """Read token ids [T] and keep the best `cap` entries of every head (None: all), and every sliding window.

    The model must run the attention "kvsearch".
    """
    layers = stock_layers(model)
    for index, policy in policies.items():
        layers[index] = RankingLayer(index, policy, model, cap)
    with torch.no_grad():
        output = model(input_ids=ids[None].to(model.device), past_key_values=Cache(layers=layers), logits_to_keep=1)
    return Prefilled(len(ids), [_states(layer) for layer in layers], output.logits[0, -1].float())


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    keys, values = (layer.keys, layer.values) if layer.is_sliding else layer.sorted
    return keys[0], values[0]


def windows_of(model: Any) -> dict[int, int]:
    """The sliding windows of a model, in tokens, by layer."""
    return {index: layer.sliding_window for index, layer in enumerate(stock_layers(model)) if layer.is_sliding}


def base_policies(model: Any, base: Program | Policy | Mapping[int, Policy]) -> dict[int, Policy]:
    """The policy that ranks each full-attention layer: one for all, by layer, or those of a program's prefill phase.

    Raises:
        UsageError: what is kept at one budget is not a part of what is kept at a larger one, or a layer has no policy.
        IncompatibleError: a policy does not suit the model.
    """
    layers = describe(model).full_layers
    if isinstance(base, Program):
        base = _of_program(base)
    policies = dict.fromkeys(layers, base) if isinstance(base, Policy) else dict(base)
    if odd := sorted(set(policies) ^ set(layers)):
        raise UsageError(f"layers {odd}: a search needs a policy in every full-attention layer, and in no other")
    for layer, policy in policies.items():
        _require_prefixes(policy, layer)
    check_rotary(model, policies.values())
    return {layer: policies[layer] for layer in layers}


def _of_program(program: Program) -> Mapping[int, Policy]:
    if program.allocation is not None:
        raise UsageError(
            f"allocation {program.allocation.name} shares entries anew for every prompt, so there are no budgets to "
            "search: give a plan with allocation static"
        )
    if program.decode is not None or program.prefill is None:
        raise UsageError("a search varies the budgets of the prefill phase: give a plan of that phase alone")
    return program.prefill.policies


def _require_prefixes(policy: Policy, layer: int) -> None:
    """UsageError if the entries that `policy` keeps at a budget are not the best of one order."""
    if policy.merges_prompt:
        raise UsageError(
            f"layer {layer}: policy {policy.name} merges what it evicts into what it keeps, so every budget has other "
            "keys and values and nothing can be shared: search with another policy"
        )
    budgets = 2 ** torch.arange(31)
    if bool(policy.exempt(budgets, torch.full_like(budgets, 2**31)).any()):
        raise UsageError(
            f"layer {layer}: policy {policy.name} never evicts some heads, whatever their budget, so there is nothing "
            "to search: use another policy"
        )
