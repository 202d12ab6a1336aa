"""Dynamic allocation at runtime: layers state demands as the prompt passes, and hold what they may still get.

Where layers share one pool of entries, a layer's budget is final only after the last layer. Until then each holds the
most that it can still get, ranked, and is trimmed as other layers come in: nested, so the entries that stay are those
that deciding at the end would keep, and never more than one dense layer is alive beside the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.dynamic import Allocation, LayerDemand, Shares
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import InternalError, NonFiniteError
from kvsearch.kernels.dispatch import serves
from kvsearch.plan.schema import NO_CARRY
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.policies.checks import read_checked_lengths, read_lengths
from kvsearch.policies.decoding import Cached, State
from kvsearch.policies.ranking import rank_scored, score_entries
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.rule import StepRule
from kvsearch.runtime.eviction import PhaseRule, evict
from kvsearch.runtime.program import PhaseProgram, Program
from kvsearch.runtime.store.blocks import Block, copy_dense_blocks
from kvsearch.runtime.store.flat import AnyBlock, FlatBlock, regroup
from kvsearch.runtime.store.slots import SlotSource, pack
from kvsearch.runtime.store.storage import RaggedStore

if TYPE_CHECKING:
    from kvsearch.plan import Phase

NO_CAP = 2**31 - 1  # entries a head may hold while decoding


class PhaseShares:
    """Budget shares of every sequence of a batch in one phase."""

    def __init__(self, allocation: Allocation, phase: PhaseProgram, lengths: Sequence[int], lasting: bool) -> None:
        self.lasting = lasting  # whether the budgets hold while the sequences grow
        self.rows = {layer: row for row, layer in enumerate(sorted(phase.policies))}
        self.policies = phase.policies
        self.carries = phase.carries
        self.of_sequence: list[Shares] = []
        for length in lengths:
            planned = phase.table(length)
            least = [max(policy.protected(length), phase.floor) for _, policy in sorted(phase.policies.items())]
            floors = np.repeat(np.array(least, dtype=np.int64)[:, None], planned.shape[1], 1)
            self.of_sequence.append(Shares(allocation, planned, floors, np.full_like(planned, length)))

    def add(self, layer: int, demands: LayerDemands) -> None:
        """Add the demand of a layer, for every sequence."""
        row = self.rows[layer]
        for sequence, shares in enumerate(self.of_sequence):
            floor = int(shares.floors[row].min())  # the least that a head is given before demands count
            shares.add(row, demands.of(sequence, floor, shares.open_to(row)))

    def most(self, layer: int) -> Ints:
        """Return the most entries that the layer's heads can still get, [B, Hkv]."""
        return np.stack([shares.most(self.rows[layer]) for shares in self.of_sequence])

    def of_layer(self, layer: int) -> Ints:
        """Return the budgets [B, Hkv] of a layer that shares nothing with others."""
        row = self.rows[layer]
        return np.stack([shares.layer_budgets(row) + self._spare(shares)[row] for shares in self.of_sequence])

    def budgets(self) -> dict[int, Ints]:
        """Return the final budgets [B, Hkv] by layer, once all have stated their demands."""
        decided = np.stack([shares.budgets() + self._spare(shares) for shares in self.of_sequence], 1)
        return {layer: decided[row] for layer, row in self.rows.items()}

    def _spare(self, shares: Shares) -> Ints:
        """Return what a prompt shorter than its budgets leaves for the tokens that follow, [L, Hkv]."""
        return shares.spare if self.lasting else np.zeros_like(shares.spare)


class Sharing:
    """The dynamic allocation of one cache; layers end their prompts in ascending order."""

    def __init__(self, allocation: Allocation, program: Program) -> None:
        self.allocation = allocation
        self.program = program
        self._phases: dict[Phase, PhaseShares] = {}
        # a layer until its budgets are known: what it holds, its decode rule, and the columns of its prompt
        self.waiting: dict[int, tuple[EntryPool, StepRule | None, int]] = {}
        self._ready: dict[int, RaggedStore | Decoding] = {}

    def needs(self, layer: int) -> list[Needs]:
        """Return what the demand of a layer needs of its prompt."""
        policy = self._policy(layer)
        return [policy.needs(), self.allocation.needs(policy)]

    def end(self, index: int, observation: Observation) -> None:
        """Process the prompt of a layer; `take` has its entries at once, or, of a shared pool, after the last layer."""
        layers = self.program.layers
        # The first layer begins a new prompt: demands of the one before are forgotten.
        if index == layers[0]:
            self.waiting.clear()
            lengths = read_lengths(observation)
            phases: dict[Phase, PhaseProgram | None] = {"prefill": self.program.prefill, "decode": self.program.decode}
            self._phases = {
                name: PhaseShares(self.allocation, phase, lengths, lasting=name == "decode")
                for name, phase in phases.items()
                if phase is not None
            }
        # Made once, as both phases share out by the same scores.
        demands = LayerDemands(self.allocation, self._policy(index), observation)
        for phase in self._phases.values():
            if index in phase.rows:
                phase.add(index, demands)
        if not self.allocation.shares_layers:  # else a layer's budgets are known only after the last one
            self._ready[index] = self._now(index, observation)
            return
        shared = self._phases.get("prefill")
        for earlier, (pool, _, _) in self.waiting.items():  # first, so that this layer's entries find room
            if shared is not None and earlier in shared.rows:
                pool.trim(shared.most(earlier))
        self.waiting[index] = self._pool(index, observation)
        if index == layers[-1]:
            self._finish()

    def take(self, index: int) -> RaggedStore | Decoding | None:
        """Return the entries of a layer, once; None while they are not final."""
        return self._ready.pop(index, None)

    def forget(self, index: int) -> None:
        """Drop what is held for a layer."""
        self.waiting.pop(index, None)
        self._ready.pop(index, None)

    def nbytes(self, index: int) -> int:
        """Return the bytes held for a layer until it takes them."""
        return self.waiting[index][0].nbytes() if index in self.waiting else 0

    def _policy(self, layer: int) -> Policy:
        """Return the policy whose scores are compared: that of the prefill phase, if there is one."""
        return next(phase.policies[layer] for phase in self.program.phases if layer in phase.policies)

    def _now(self, index: int, observation: Observation) -> RaggedStore | Decoding:
        """Evict a layer at once."""

        def rule(name: Phase) -> PhaseRule | None:
            phase = self._phases.get(name)
            if phase is None or index not in phase.rows:
                return None
            budgets = torch.from_numpy(phase.of_layer(index))
            return PhaseRule(phase.policies[index], lambda _: budgets, phase.carries.get(index, NO_CARRY))

        return evict(observation, rule("prefill"), rule("decode"))

    def _pool(self, index: int, observation: Observation) -> tuple[EntryPool, StepRule | None, int]:
        rule = state = None
        prefill = self._phases.get("prefill")
        decode = self._phases.get("decode")
        if decode is not None and index in decode.rows:
            unknown = torch.full(observation.keys.shape[:2], NO_CAP)  # binds nothing
            rule = StepRule.after(decode.policies[index], unknown, observation)
            state = rule.start(observation)
        lengths = np.array(read_lengths(observation))[:, None]
        whole = np.repeat(lengths, observation.keys.shape[1], 1)
        # Without a prefill phase everything stays until decoding, so nothing bounds what is held.
        max_entries = prefill.most(index) if prefill is not None and index in prefill.rows else whole
        ranks = rank_under(self._policy(index), observation)
        return (EntryPool.take(observation, ranks, max_entries, state), rule, observation.keys.shape[2])

    def _finish(self) -> None:
        budgets = {name: phase.budgets() for name, phase in self._phases.items()}
        prefill = budgets.get("prefill", {})
        decode = budgets.get("decode", {})
        for index in list(self.waiting):
            # One layer at a time: only one is in memory twice.
            pool, rule, columns = self.waiting.pop(index)
            if index in prefill:
                pool.trim(prefill[index])
            if rule is None:
                self._ready[index] = pool.store()
                continue
            rule.bound(decode[index])
            self._ready[index] = Decoding(pack(pool.sources(), rule), rule, columns)
        self._phases = {}


class LayerDemands:
    """The demands of one layer, per sequence of a batch: its entries by score, and how much it wants."""

    def __init__(self, allocation: Allocation, policy: Policy, observation: Observation) -> None:
        self.allocation = allocation
        self.policy = policy
        scores = score_entries(policy, observation)
        # [B, Hkv, T], protected entries first, then the candidates from the highest score on, then padding
        self.ordered = torch.empty_like(scores).scatter_(-1, rank_scored(policy, observation).long(), scores)
        self.lengths = read_checked_lengths(observation)
        self._demands: dict[tuple[int, int, int], LayerDemand] = {}
        self.weights = [1.0] * len(self.lengths)
        if allocation.shares_layers:
            candidates = [
                self.ordered[sequence, :, policy.protected(length) : length]
                for sequence, length in enumerate(self.lengths)
            ]
            self.weights = allocation.weight(policy, observation, candidates)
            for row, weight in enumerate(self.weights):
                if not weight < math.inf:  # nor NaN; -inf is the logarithm of nothing
                    raise NonFiniteError(
                        f"layer {observation.layer}: the scores of {policy.name} give it no finite weight, so its "
                        "budgets cannot be decided: the model computes NaN or infinity",
                        row,
                    )

    def of(self, sequence: int, floor: int, free: int) -> LayerDemand:
        """Return the demand of a sequence whose heads have `floor` entries each, for at least `free` beyond them."""
        key = (sequence, floor, free)
        if key not in self._demands:
            length = self.lengths[sequence]
            ranked = self.ordered[sequence, :, max(floor, self.policy.protected(length)) : length]
            order = self.allocation.order(ranked, free) if self.allocation.shares_heads else np.zeros(0, dtype=np.uint8)
            self._demands[key] = LayerDemand(self.weights[sequence], order, self.allocation.scores(ranked, free))
        return self._demands[key]


@dataclass
class Part:
    """Segments of a layer, with the rank of each entry in its segment and the decode phase's state."""

    block: AnyBlock
    ranks: Tensor  # int32, as the block's positions: [S, capacity] or [N]
    state: dict[str, Tensor]  # [S, capacity, ...] or [N, ...]
    counts: Ints  # [S] entries

    def trimmed(self, budgets: Ints) -> list[Part]:
        """Return the entries ranked below `budgets` [S] int64, as one part or several of nearly equal counts."""
        counts = np.minimum(self.counts, budgets)
        if (counts == self.counts).all():
            return [self]
        # Ranks are of the whole head, so what budget after budget leaves is what the last one alone would leave.
        limits = self.block.spread(torch.from_numpy(budgets).to(self.ranks.device))
        keep = (self.block.positions >= 0) & (self.ranks < limits)
        return [
            Part(block, self.ranks[where], {name: held[where] for name, held in self.state.items()}, counts[rows])
            for block, where, rows in self.block.kept(keep, counts)
        ]


@dataclass
class EntryPool:
    """The entries one layer holds for a batch until its budgets are known."""

    parts: list[Part]
    heads: int
    tokens: Tensor  # [B] int32 tokens of each sequence
    lengths: list[int]  # the same on the host
    layer: int
    per_head: dict[str, Tensor] = field(default_factory=dict)  # state per segment, [B * Hkv, ...]

    @classmethod
    def take(cls, observation: Observation, ranks: Tensor, budgets: Ints, state: State | None) -> EntryPool:
        """Copy what is ranked below `budgets` [B, Hkv] out of a dense prompt.

        `ranks` [B, Hkv, T] int, `state` as `StepRule.start` gives it; None: there is no decode phase.
        """
        lengths = observation.lengths.tolist()
        keep = (ranks < torch.from_numpy(budgets).to(ranks.device)[..., None]) & observation.valid[:, None]
        counts = np.minimum(budgets, np.array(lengths)[:, None]).flatten()
        heads = keep.shape[1]
        tokens = observation.seen.int()
        layer = observation.layer
        if state is None and serves(observation.keys, observation.values):
            whole, places = FlatBlock.pack(observation.keys, observation.values, keep, observation.index, counts)
            return cls([Part(whole, ranks.flatten()[places].int(), {}, counts)], heads, tokens, lengths, layer)
        state = State() if state is None else state
        flat_ranks = ranks.flatten(0, 1)
        flat_state = {name: tensor.flatten(0, 1) for name, tensor in state.entries.items()}
        parts = []
        for block, columns in copy_dense_blocks(observation.keys, observation.values, keep, observation.index, counts):
            where = (block.segments[:, None], columns)
            held = {name: tensor[where] for name, tensor in flat_state.items()}
            kept_counts = counts[block.segments.cpu().numpy()]
            parts.append(Part(block, flat_ranks[where].int(), held, kept_counts))
        per_head = {name: tensor.flatten(0, 1) for name, tensor in state.heads.items()}
        return cls(parts, heads, tokens, lengths, layer, per_head)

    def trim(self, budgets: Ints) -> None:
        """Forget what is not ranked below `budgets` [B, Hkv] int64."""
        flat = budgets.flatten()
        parts = self.parts
        self.parts = []
        while parts:  # one by one: only one part's entries are there twice for a moment
            part = parts.pop(0)
            self.parts += part.trimmed(flat[part.block.segments.cpu().numpy()])

    def store(self) -> RaggedStore:
        """Return the entries as storage that tokens can be appended to."""
        blocks = regroup([part.block for part in self.parts])
        return RaggedStore(blocks, self.heads, self.tokens, len(set(self.lengths)) == 1)

    def sources(self) -> list[SlotSource]:
        """Return the entries as sources for the storage of a decode phase."""
        sources = []
        for part in self.parts:
            block = part.block
            # Segments of a block are aligned on the right, so entry n of m is at capacity - m + n.
            names = part.block.segments
            if not isinstance(block, Block):
                raise InternalError("a decode phase was not foreseen when a prompt's entries were taken")
            counts = torch.from_numpy(part.counts).to(names.device)[:, None]
            place = torch.arange(int(part.counts.max()), device=names.device)
            order = torch.where(place < counts, place + block.keys.shape[1] - counts, -1)
            state = State(part.state, {name: tensor[names] for name, tensor in self.per_head.items()})
            cached = Cached(block.keys, block.values, block.positions.long(), state, self.layer, names % self.heads)
            seen = self.tokens.long()[names // self.heads]
            sources.append(SlotSource(names.cpu().numpy(), cached, order, part.counts, seen))
        return sources

    def nbytes(self) -> int:
        """Return the bytes of storage allocated: entries, ranks and state."""
        held = [tensor for part in self.parts for tensor in (*part.block.tensors(), part.ranks, *part.state.values())]
        return sum(tensor.untyped_storage().nbytes() for tensor in [*held, *self.per_head.values()])
