"""The end of a prompt: what the prefill phase keeps of it, and what the decode phase starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import NonFiniteError
from kvsearch.plan.schema import NO_CARRY, Carry
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import Needs
from kvsearch.policies.carry import REFERENCES, match_attention
from kvsearch.policies.checks import DeferredCheck, read_checked_lengths, read_lengths, require_finite, start_state
from kvsearch.policies.decoding import LOG_WEIGHTS, State, list_slots
from kvsearch.policies.ranking import apply_to_each, find_limits, first_stage_scores, keep_at, score_entries
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.rule import UNBOUNDED, Limits, StepRule, decode_needs
from kvsearch.runtime.store.slots import pack, split_segments, take_entries
from kvsearch.runtime.store.storage import RaggedStore

BudgetRule = Callable[[list[int]], Tensor]


class PhaseRule(NamedTuple):
    """The policy of one layer in one phase, and its budgets: lengths of a batch -> entries [B, Hkv] int64."""

    policy: Policy
    budgets: BudgetRule
    carry: Carry = NO_CARRY  # what entries that stay carry of those that leave

    @property
    def carries(self) -> bool:
        """Whether kept entries have log weights."""
        return self.carry != NO_CARRY


def collect_needs(prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Needs]:
    """Return what the rules of both phases need of a prompt."""
    needs = [] if prefill is None else [prefill.policy.needs()]
    if prefill is not None and prefill.carries:
        needs.append(Needs(references=REFERENCES))
    return needs if decode is None else [*needs, decode_needs(decode.policy)]


class Kept(NamedTuple):
    """What the prefill phase left of a prompt, and the decode phase's rule and running state, if there is one."""

    observation: Observation  # with merged keys and values where the policy merges, with others where entries carry
    keep: Tensor  # [B, Hkv, T] bool
    counts: Ints  # [B, Hkv] entries that are kept
    rule: StepRule | None
    state: State  # tensors [B, Hkv, T, ...] and [B, Hkv, ...], log weights among them where entries carry


def select(observation: Observation, prefill: PhaseRule | None, decode: PhaseRule | None) -> Kept:
    """Decide which entries of a dense prompt stay (all without a prefill phase); its tensors are not changed."""
    if prefill is not None:  # first, so that the host reads lengths and whether scores are finite in one go
        score_entries(prefill.policy, observation)
        first_stage_scores(prefill.policy, observation)
    lengths = read_checked_lengths(observation)
    rule = None if decode is None else StepRule.after(decode.policy, find_rule_limits(decode, lengths), observation)
    # Whole numbers per head are settled on the host, which knows budgets and lengths.
    limits = None if prefill is None else find_limits(prefill.policy, prefill.budgets(lengths), lengths)
    tables = ([] if limits is None else [limits]) + ([] if rule is None else [Limits.table(rule.policy, rule.budgets)])
    # One copy to the device for both phases.
    placed = _place_protected(tables, observation.keys.device)
    keep = observation.valid[:, None].expand(observation.keys.shape[:3])
    state = None
    counts: Ints = np.repeat(np.array(lengths)[:, None], keep.shape[1], 1)
    if prefill is not None and limits is not None:
        keep = keep_at(prefill.policy, observation, placed[0])
        whole = counts
        counts = np.minimum(counts, limits[0].numpy())
        if prefill.policy.merges_prompt:
            # How many leave and stay at most is known here, so that merging needs no sizes of the device.
            gone = int((whole - counts).max())
            observation, state = merge_evicted(prefill.policy, observation, keep, gone, int(counts.max()))
    if rule is None or decode is None:
        state = State()
    else:
        rule.there = placed[-1]
        # What merging made of the running state goes on under the same policy only; another one begins with the prompt.
        if state is None or prefill is None or prefill.policy != decode.policy:
            state = rule.start(observation)
    # Last, as weights and values are fitted to the entries that stay.
    if prefill is not None and prefill.carries:
        values, log_weights = match_attention(observation, keep, counts, lengths)
        require_finite([DeferredCheck(~log_weights.flatten(1).isfinite().all(-1), partial(_weight_error, observation))])
        state.entries[LOG_WEIGHTS] = log_weights
        observation = replace(observation, values=values)
    return Kept(observation, keep, counts, rule, state)


def _weight_error(observation: Observation, row: int) -> NonFiniteError:
    problem = "the log weights of what entries carry are not finite: the model computes NaN or infinity"
    return NonFiniteError(f"layer {observation.layer}: {problem}", row)


def _place_protected(tables: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tables of whole numbers to a device in one go."""
    if not tables:
        return []
    sizes = [table.numel() for table in tables]
    parts = torch.split_with_sizes(torch.cat([table.flatten() for table in tables]).to(device), sizes)
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]


def evict(observation: Observation, prefill: PhaseRule | None, decode: PhaseRule | None) -> RaggedStore | Decoding:
    """Evict a dense prompt: pack the entries that stay, ready for the next token."""
    left = select(observation, prefill, decode)
    if left.rule is not None:
        source = take_entries(left.observation, left.keep, left.counts, left.state)
        return Decoding(pack([source], left.rule), left.rule, left.keep.shape[2])
    # Without a decode phase no entry leaves any more, so it gets no slot and no state.
    states = (left.observation.keys, left.observation.values)
    log_weights = left.state.entries.get(LOG_WEIGHTS)
    return RaggedStore.pack(*states, left.keep, observation.index, left.counts, read_lengths(observation), log_weights)


def find_rule_limits(decode: PhaseRule, lengths: list[int]) -> Tensor:
    """Return decode budgets [B, Hkv] for prompts of these lengths, UNBOUNDED where the policy never evicts a head."""
    budgets = decode.budgets(lengths)

    def limit(budget: int, length: int) -> int:
        return UNBOUNDED if decode.policy.keeps_all(budget, length) else budget

    return apply_to_each(limit, budgets, torch.tensor(lengths)[:, None].expand_as(budgets))


def merge_evicted(
    policy: Policy, observation: Observation, keep: Tensor, max_leaving: int, stay: int
) -> tuple[Observation, State]:
    """Merge entries that leave into those that stay (`keep` [B, Hkv, T] bool); return observation and policy state.

    At most `max_leaving` entries leave a head and `stay` stay. Copies: the observation keeps its tensors.
    """
    segments = split_segments(observation, start_state(policy, observation))
    state = segments.state.changed(torch.clone, torch.clone)
    cached = replace(
        segments, keys=segments.keys.clone(), values=segments.values.clone(), state=state, most_staying=stay
    )
    leaving = cached.held & ~keep.flatten(0, 1)
    if max_leaving:
        with torch.no_grad():  # how much is merged is not learned
            policy.merge(cached, list_slots(leaving, cached.positions, max_leaving))

    def whole(tensor: Tensor) -> Tensor:
        return tensor.view(*keep.shape[:2], *tensor.shape[1:])

    changed = replace(observation, keys=whole(cached.keys), values=whole(cached.values))
    return changed, cached.state.changed(whole, whole)
