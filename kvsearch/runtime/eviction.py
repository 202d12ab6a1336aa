"""The end of a prompt: what the prefill phase keeps of it, and what the decode phase starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsearch.policies import Observation, Policy, keep_under
from kvsearch.policies.decoding import Cached, State
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.decoding import Decoding
from kvsearch.runtime.rule import UNBOUNDED, DecodeRule, slots_of
from kvsearch.runtime.storage import RaggedStore

Budgets = Callable[[list[int]], Tensor]


class PhaseRule(NamedTuple):
    """The policy of one layer in one phase, and its budgets: lengths of a batch -> entries [B, Hkv] int64."""

    policy: Policy
    budgets: Budgets


class Kept(NamedTuple):
    """What the prefill phase left of a prompt, and the decode phase's rule and running state, if there is one."""

    observation: Observation  # with merged keys and values, where the policy merges
    keep: Tensor  # [B, Hkv, T] bool
    rule: DecodeRule | None
    state: State  # tensors [B, Hkv, T, ...] and [B, Hkv, ...]


def select(observation: Observation, prefill: PhaseRule | None, decode: PhaseRule | None, rotary: Rotary) -> Kept:
    """Decide what is kept of a dense prompt, everything without a prefill phase; its tensors stay as they are."""
    lengths = observation.lengths.tolist()
    keep, state = observation.valid[:, None].expand(observation.keys.shape[:3]), None
    if prefill is not None:
        keep = keep_under(prefill.policy, observation, prefill.budgets(lengths))
        if prefill.policy.merges_prompt:
            observation, state = merged(prefill.policy, observation, keep)
    if decode is None:
        return Kept(observation, keep, None, State())
    rule = DecodeRule(decode.policy, limits_of(decode, lengths), observation, rotary)
    if state is None or prefill is None or prefill.policy != decode.policy:
        state = rule.start(observation)
    return Kept(observation, keep, rule, state)


def evict(
    observation: Observation, prefill: PhaseRule | None, decode: PhaseRule | None, rotary: Rotary
) -> RaggedStore | Decoding:
    """Pack what is kept of a dense prompt; with a decode phase its rule is ready for the next token."""
    left = select(observation, prefill, decode, rotary)
    if left.rule is not None:
        return Decoding.begin(left.observation, left.keep, left.rule, left.state)
    return RaggedStore.pack(left.observation.keys, left.observation.values, left.keep, observation.index)


def limits_of(decode: PhaseRule, lengths: list[int]) -> Tensor:
    """Decode budgets [B, Hkv] for prompts of these lengths, UNBOUNDED for heads that the policy never evicts."""
    budgets = decode.budgets(lengths)
    return budgets.masked_fill(
        decode.policy.exempt(budgets, torch.tensor(lengths)[:, None].expand_as(budgets)), UNBOUNDED
    )


def merged(policy: Policy, observation: Observation, keep: Tensor) -> tuple[Observation, State]:
    """The prompt with what leaves merged into what stays (`keep` [B, Hkv, T] bool), and the policy's state after it.

    Works on copies: the tensors of the observation stay as they are.
    """
    shape, heads = keep.shape[:2], keep.shape[1]
    index = observation.index.repeat_interleave(heads, 0)
    cached = Cached(
        observation.keys.flatten(0, 1).clone(),
        observation.values.flatten(0, 1).clone(),
        index,
        policy.start(observation).changed(_flat_copy, _flat_copy),
        observation.layer,
        torch.arange(heads, device=keep.device).repeat(shape[0]),
    )
    leaving = (index >= 0) & ~keep.flatten(0, 1)
    if bool(leaving.any()):
        policy.merge(cached, slots_of(leaving, index))

    def whole(tensor: Tensor) -> Tensor:
        return tensor.view(*shape, *tensor.shape[1:])

    changed = replace(observation, keys=whole(cached.keys), values=whole(cached.values))
    return changed, cached.state.changed(whole, whole)


def _flat_copy(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1).clone()
