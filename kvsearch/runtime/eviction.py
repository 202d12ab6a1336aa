"""The end of a prompt: what the prefill phase keeps of it, and what the decode phase starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsearch.policies import Observation, Policy, keep_under
from kvsearch.policies.base import Needs
from kvsearch.policies.checks import check_state, lengths_after
from kvsearch.policies.decoding import State, slots_of
from kvsearch.policies.ranking import at_each, first_staged, scored
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.decoding import Decoding
from kvsearch.runtime.rule import UNBOUNDED, StepRule, decode_needs
from kvsearch.runtime.slots import segments_of
from kvsearch.runtime.storage import RaggedStore

Budgets = Callable[[list[int]], Tensor]


class PhaseRule(NamedTuple):
    """The policy of one layer in one phase, and its budgets: lengths of a batch -> entries [B, Hkv] int64."""

    policy: Policy
    budgets: Budgets


def rules_need(prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Needs]:
    """Return what the policies of both phases must be given of a prompt."""
    needs = [] if prefill is None else [prefill.policy.needs()]
    return needs if decode is None else [*needs, decode_needs(decode.policy)]


class Kept(NamedTuple):
    """What the prefill phase left of a prompt, and the decode phase's rule and running state, if there is one."""

    observation: Observation  # with merged keys and values, where the policy merges
    keep: Tensor  # [B, Hkv, T] bool
    rule: StepRule | None
    state: State  # tensors [B, Hkv, T, ...] and [B, Hkv, ...]


def select(observation: Observation, prefill: PhaseRule | None, decode: PhaseRule | None, rotary: Rotary) -> Kept:
    """Decide what is kept of a dense prompt, everything without a prefill phase; its tensors stay as they are."""
    if prefill is not None:  # first, so that the host reads lengths and whether scores are finite in one go
        scored(prefill.policy, observation)
        first_staged(prefill.policy, observation)
    lengths = lengths_after(observation)
    keep, state = observation.valid[:, None].expand(observation.keys.shape[:3]), None
    if prefill is not None:
        keep = keep_under(prefill.policy, observation, prefill.budgets(lengths))
        if prefill.policy.merges_prompt:
            observation, state = merged(prefill.policy, observation, keep)
    if decode is None:
        return Kept(observation, keep, None, State())
    rule = StepRule.after(decode.policy, limits_of(decode, lengths), observation, rotary)
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
    """Return decode budgets [B, Hkv] for prompts of these lengths, UNBOUNDED where the policy never evicts a head."""
    budgets = decode.budgets(lengths)

    def limit(budget: int, length: int) -> int:
        return UNBOUNDED if decode.policy.exempt(budget, length) else budget

    return at_each(limit, budgets, torch.tensor(lengths)[:, None].expand_as(budgets))


def merged(policy: Policy, observation: Observation, keep: Tensor) -> tuple[Observation, State]:
    """Merge what leaves a prompt into what stays (`keep` [B, Hkv, T] bool); return it with the policy's state after it.

    Works on copies: the tensors of the observation stay as they are.
    """
    given = segments_of(observation, check_state(policy, policy.start(observation), observation))
    state = given.state.changed(torch.clone, torch.clone)
    cached = replace(given, keys=given.keys.clone(), values=given.values.clone(), state=state)
    leaving = cached.held & ~keep.flatten(0, 1)
    if bool(leaving.any()):
        policy.merge(cached, slots_of(leaving, cached.positions))

    def whole(tensor: Tensor) -> Tensor:
        return tensor.view(*keep.shape[:2], *tensor.shape[1:])

    changed = replace(observation, keys=whole(cached.keys), values=whole(cached.values))
    return changed, cached.state.changed(whole, whole)
