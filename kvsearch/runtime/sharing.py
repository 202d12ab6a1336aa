"""Dynamic allocation under way: every layer states its wish when its prompt ends, and holds what it may still get.

Where layers share one pool of entries, a layer's budget is final only after the last layer. Until then each holds the
most that it can still get, ranked, and is trimmed as other layers come in: nested, so the entries that stay are those
that deciding at the end would keep, and never more than one dense layer is alive beside the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.budgets.dynamic import Allocation, Order, Shares, Wish
from kvsearch.errors import IncompatibleError
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.policies.decoding import State
from kvsearch.policies.ranking import rank_scored, scored
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.decoding import Decoding
from kvsearch.runtime.eviction import PhaseRule, evict
from kvsearch.runtime.pool import Pool
from kvsearch.runtime.program import PhaseProgram, Program
from kvsearch.runtime.rule import DecodeRule
from kvsearch.runtime.slots import pack
from kvsearch.runtime.storage import RaggedStore

if TYPE_CHECKING:
    from kvsearch.runtime.layer import EvictingLayer

Ints = NDArray[np.int64]
NO_CAP = 2**31 - 1  # entries a head may hold while decoding


class Phases(NamedTuple):
    """Something of the prefill and of the decode phase; None where a phase does nothing."""

    prefill: PhaseShares | None
    decode: PhaseShares | None


class PhaseShares:
    """The shares of every sequence of a batch in one phase."""

    def __init__(self, allocation: Allocation, phase: PhaseProgram, lengths: Sequence[int], lasting: bool) -> None:
        self.lasting = lasting  # whether the budgets hold while the sequences grow
        self.rows = {layer: row for row, layer in enumerate(sorted(phase.policies))}
        self.policies = phase.policies
        self.of_sequence = [_shares(allocation, phase, length) for length in lengths]

    def floor(self, sequence: int, layer: int) -> int:
        """Entries that every head of the layer is given before wishes count: the least of them."""
        return int(self.of_sequence[sequence].floors[self.rows[layer]].min())

    def open_to(self, sequence: int, layer: int) -> int:
        """The most entries beyond the floors that the layer can get."""
        return self.of_sequence[sequence].open_to(self.rows[layer])

    def add(self, sequence: int, layer: int, wish: Wish) -> None:
        """The wish of a layer."""
        self.of_sequence[sequence].add(self.rows[layer], wish)

    def most(self, layer: int) -> Ints:
        """What the layer's heads can still get, [B, Hkv]."""
        return np.stack([shares.most(self.rows[layer]) for shares in self.of_sequence])

    def of_layer(self, layer: int) -> Ints:
        """Budgets [B, Hkv] of a layer that shares nothing with others."""
        row = self.rows[layer]
        return np.stack([shares.layer_budgets(row) + self._spare(shares)[row] for shares in self.of_sequence])

    def budgets(self) -> dict[int, Ints]:
        """Final budgets [B, Hkv] by layer, once all have stated their wish."""
        decided = np.stack([shares.budgets() + self._spare(shares) for shares in self.of_sequence], 1)
        return {layer: decided[row] for layer, row in self.rows.items()}

    def _spare(self, shares: Shares) -> Ints:
        """What a prompt shorter than its budgets leaves for the tokens that follow, [L, Hkv]."""
        return shares.spare if self.lasting else np.zeros_like(shares.spare)


def _shares(allocation: Allocation, phase: PhaseProgram, length: int) -> Shares:
    planned = phase.table(length)
    least = [max(policy.protected(length), phase.floor) for _, policy in sorted(phase.policies.items())]
    floors = np.repeat(np.array(least, dtype=np.int64)[:, None], planned.shape[1], 1)
    return Shares(allocation, planned, floors, np.full_like(planned, length))


class Sharing:
    """The dynamic allocation of one cache; layers end their prompts in ascending order."""

    def __init__(self, allocation: Allocation, program: Program) -> None:
        self.allocation, self.program = allocation, program
        self._phases = Phases(None, None)
        self._waiting: dict[int, tuple[EvictingLayer, DecodeRule | None]] = {}

    @property
    def waits(self) -> bool:
        """Whether a layer's budgets are known only after the last layer."""
        return self.allocation.shares_layers

    def needs(self, layer: int) -> list[Needs]:
        """What the wish of a layer must be given of its prompt."""
        policy = self._policy(layer)
        return [policy.needs(), self.allocation.needs(policy)]

    def end(self, layer: EvictingLayer, observation: Observation, rotary: Rotary) -> None:
        """Take in the prompt of `layer`: set its `holder`, or its `pool`, and all holders after the last layer."""
        index, layers = layer.index, self.program.layers
        if index == layers[0]:
            self._begin(observation)
        wished = Wished(self.allocation, self._policy(index), observation)
        for phase in self._phases:
            if phase is not None and index in phase.rows:
                wished.tell(phase, index)
        if not self.waits:
            layer.holder = self._now(index, observation, rotary)
            return
        self._trim()  # first, so that this layer's entries find room
        layer.pool, rule = self._pool(index, observation, wished, rotary)
        self._waiting[index] = (layer, rule)
        if index == layers[-1]:
            self._finish()

    def _begin(self, observation: Observation) -> None:
        lengths = observation.lengths.tolist()
        self._waiting.clear()
        prefill, decode = self.program.prefill, self.program.decode
        self._phases = Phases(
            None if prefill is None else PhaseShares(self.allocation, prefill, lengths, lasting=False),
            None if decode is None else PhaseShares(self.allocation, decode, lengths, lasting=True),
        )

    def _policy(self, layer: int) -> Policy:
        """The policy whose scores are compared: that of the prefill phase, if there is one."""
        found = [phase.policies[layer] for phase in self.program.phases if layer in phase.policies]
        return found[0]

    def _now(self, index: int, observation: Observation, rotary: Rotary) -> RaggedStore | Decoding:
        """Evict at once."""

        def rule(phase: PhaseShares | None) -> PhaseRule | None:
            if phase is None or index not in phase.rows:
                return None
            budgets = torch.from_numpy(phase.of_layer(index))
            return PhaseRule(phase.policies[index], lambda _: budgets)

        return evict(observation, rule(self._phases.prefill), rule(self._phases.decode), rotary)

    def _pool(
        self, index: int, observation: Observation, wished: Wished, rotary: Rotary
    ) -> tuple[Pool, DecodeRule | None]:
        rule, state = None, State()
        decode, prefill = self._phases.decode, self._phases.prefill
        if decode is not None and index in decode.rows:
            rule = DecodeRule(decode.policies[index], _unknown(observation), observation, rotary)
            state = rule.start(observation)
        lengths = np.array(observation.lengths.tolist())[:, None]
        whole = np.repeat(lengths, observation.keys.shape[1], 1)
        most = prefill.most(index) if prefill is not None and index in prefill.rows else whole
        return Pool.take(observation, wished.ranks(), most, state), rule

    def _trim(self) -> None:
        """Layers that have passed give up what they can no longer get."""
        prefill = self._phases.prefill
        if prefill is None:
            return
        for index, (layer, _) in self._waiting.items():
            if index in prefill.rows and layer.pool is not None:
                layer.pool.trim(prefill.most(index))

    def _finish(self) -> None:
        prefill, decode = (None if phase is None else phase.budgets() for phase in self._phases)
        for index, (layer, rule) in self._waiting.items():
            pool, layer.pool = layer.pool, None
            if pool is None:
                continue
            if prefill is not None and index in prefill:
                pool.trim(prefill[index])
            if rule is None or decode is None:
                layer.holder = pool.store()
                continue
            rule.bound(decode[index])
            store = pack(pool.sources(), rule, pool.batch, pool.heads)
            layer.holder = Decoding(store, rule, store.used(), layer.seen)
        self._waiting.clear()
        self._phases = Phases(None, None)


def _unknown(observation: Observation) -> Tensor:
    """Budgets [B, Hkv] that bind nothing, until they are known."""
    return torch.full(observation.keys.shape[:2], NO_CAP)


class Wished:
    """What the wishes of one layer rest on: its entries by score, and how much it wants; per sequence of a batch."""

    def __init__(self, allocation: Allocation, policy: Policy, observation: Observation) -> None:
        self.allocation, self.policy, self.observation = allocation, policy, observation
        scores = scored(policy, observation)
        self.by_score = rank_scored(policy, observation)
        # [B, Hkv, T], protected entries first, then the candidates from the highest score on, then padding
        self.ordered = torch.empty_like(scores).scatter_(-1, self.by_score.long(), scores)
        self.lengths: list[int] = observation.lengths.tolist()
        self.weights = self._weights() if allocation.shares_layers else [1.0] * len(self.lengths)
        self._orders: dict[tuple[int, int, int], Order] = {}

    def _weights(self) -> list[float]:
        candidates = [
            self.ordered[sequence, :, self.policy.protected(length) : length]
            for sequence, length in enumerate(self.lengths)
        ]
        weights = self.allocation.weight(self.policy, self.observation, candidates)
        if not all(weight < math.inf for weight in weights):  # nor NaN; -inf is the logarithm of nothing
            raise IncompatibleError(
                f"layer {self.observation.layer}: the scores of {self.policy.name} are not finite, so its budgets "
                "cannot be decided: the model computes NaN or infinity"
            )
        return weights

    def tell(self, phase: PhaseShares, layer: int) -> None:
        """State the wish of every sequence."""
        for sequence in range(len(self.lengths)):
            floor, free = phase.floor(sequence, layer), phase.open_to(sequence, layer)
            phase.add(sequence, layer, self.wish(sequence, floor, free))

    def wish(self, sequence: int, floor: int, free: int) -> Wish:
        """The wish of a sequence whose heads have `floor` entries each, for at least `free` entries beyond them.

        Raises:
            IncompatibleError: heads are compared, and scores are not finite.
        """
        order: Order = np.zeros(0, dtype=np.uint8)
        if self.allocation.shares_heads:
            order = self._order(sequence, floor, free)
        return Wish(self.weights[sequence], order)

    def _order(self, sequence: int, floor: int, free: int) -> Order:
        key = (sequence, floor, free)
        if key not in self._orders:
            length = self.lengths[sequence]
            ranked = self.ordered[sequence, :, max(floor, self.policy.protected(length)) : length]
            if not bool(ranked.isfinite().all()):
                raise IncompatibleError(
                    f"layer {self.observation.layer}: the scores of {self.policy.name} are not finite, so its heads "
                    "cannot be compared: the model computes NaN or infinity"
                )
            self._orders[key] = self.allocation.order(ranked, free)
        return self._orders[key]

    def ranks(self) -> Tensor:
        """Rank of every entry in its head, [B, Hkv, T]."""
        if self.policy.first_stage(self.observation) is None:
            return self.by_score
        return rank_under(self.policy, self.observation)
