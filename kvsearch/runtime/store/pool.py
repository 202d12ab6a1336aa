"""What a layer of a prompt holds while later layers are still to come: entries with their ranks, to be trimmed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import InternalError
from kvsearch.kernels.dispatch import serves
from kvsearch.policies import Observation
from kvsearch.policies.decoding import Cached, State
from kvsearch.runtime.store.blocks import Block, dense_blocks
from kvsearch.runtime.store.flat import AnyBlock, FlatBlock, regrouped
from kvsearch.runtime.store.slots import SlotSource
from kvsearch.runtime.store.storage import RaggedStore


@dataclass
class Part:
    """Some segments: `block` with the rank of each entry in its segment and the decode phase's state."""

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
        for block, columns in dense_blocks(observation.keys, observation.values, keep, observation.index, counts):
            where = (block.segments[:, None], columns)
            held = {name: tensor[where] for name, tensor in flat_state.items()}
            kept_counts = counts[block.segments.cpu().numpy()]
            parts.append(Part(block, flat_ranks[where].int(), held, kept_counts))
        per_head = {name: tensor.flatten(0, 1) for name, tensor in state.heads.items()}
        return cls(parts, heads, tokens, lengths, layer, per_head)

    @property
    def batch(self) -> int:
        return len(self.tokens)

    def trim(self, budgets: Ints) -> None:
        """Forget what is not ranked below `budgets` [B, Hkv] int64."""
        flat = budgets.flatten()
        parts = self.parts
        self.parts = []
        while parts:  # one by one: only one part's entries are there twice for a moment
            part = parts.pop(0)
            self.parts += part.trimmed(flat[part.block.segments.cpu().numpy()])

    def store(self) -> RaggedStore:
        """Return what is held, as storage that tokens can be appended to."""
        blocks = regrouped([part.block for part in self.parts])
        return RaggedStore(blocks, self.heads, self.tokens, len(set(self.lengths)) == 1)

    def sources(self) -> list[SlotSource]:
        """Return what is held, as the storage of a decode phase takes it."""
        sources = []
        for part in self.parts:
            block = part.block
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
